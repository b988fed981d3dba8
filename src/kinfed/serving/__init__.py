"""What a finished run's models are used for: exports, and a service that answers by HTTP."""
