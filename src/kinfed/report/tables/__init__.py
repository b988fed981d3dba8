"""Finished runs compared, as tables."""
