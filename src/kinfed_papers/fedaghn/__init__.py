"""FedAGHN (Song et al., 2025): its tables and what only they need."""
