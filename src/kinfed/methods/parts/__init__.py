"""Parts that methods are built from."""
