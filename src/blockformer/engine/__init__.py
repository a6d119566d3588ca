"""Faster ways to run a model on one kind of processor. Never part of an exported repo."""
