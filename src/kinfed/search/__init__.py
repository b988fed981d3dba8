"""Which method and settings suit a federation."""
