"""A page that shows a model: its figure with every box explained, compared with a reference, with a text through it."""
