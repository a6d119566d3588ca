"""A page that shows a model: its figure with every box explained, beside a reference, with a text through it."""
