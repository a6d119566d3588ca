"""Text to train on and to measure with: gathered, split by file, as tokens. Never part of a repo."""
