"""The programs of a federation's server and sites."""
