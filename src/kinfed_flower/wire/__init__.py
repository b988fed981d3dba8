"""What travels between the server of a federation and its sites, and the keys by which they know each other."""
