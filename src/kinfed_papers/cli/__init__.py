"""The command about published papers, one file an action."""
