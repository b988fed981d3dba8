"""The server of a federation on many machines."""
