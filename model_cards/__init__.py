"""The model cards: one per family, and the template that an exported repo gets."""
