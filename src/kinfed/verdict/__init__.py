"""What is measured beside the task's own scores."""
