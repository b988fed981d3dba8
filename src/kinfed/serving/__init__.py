"""What a finished run's models are used for: exports, a service that answers by HTTP, and models for newcomers."""
