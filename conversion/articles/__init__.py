"""Weights of the models that articles build: read from the state dicts of their own code, never written."""
