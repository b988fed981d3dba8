"""The originals of data sets: where they are published, and how their files become arrays."""
