"""Relations that are known, and controls."""
