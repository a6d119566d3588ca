"""What helps to train a model: parameter groups, AdamW, callbacks, the loss in chunks. Never part of a repo."""
