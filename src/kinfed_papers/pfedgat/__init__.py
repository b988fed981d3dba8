"""What only studies of pFedGAT need: other graphs than its attention, and other answers than gradients."""
