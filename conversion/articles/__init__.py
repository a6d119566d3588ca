"""Weights trained with the articles' own code: read from its state dicts, never written."""
