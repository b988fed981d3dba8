"""One round: what a server and its clients know and do. Imports nothing else of kinfed."""
