"""Who runs the clients on this machine."""
