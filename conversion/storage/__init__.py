"""How official checkpoints are stored, as far as the official classes have it otherwise."""
