"""A site of a federation: its examples, its models, its rules."""
