"""From a config to a finished run folder, and many of them."""
