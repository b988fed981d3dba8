"""Published tables, and what only a paper does."""
