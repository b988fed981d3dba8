"""What travels between a federation's server and its sites."""
