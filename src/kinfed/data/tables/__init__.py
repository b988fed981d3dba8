"""Your own tables: from files and databases to columns of numbers."""
