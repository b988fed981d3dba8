"""The commands about papers, one file a command."""
