"""Privacy: noised steps, their price, and the client that takes no others."""
