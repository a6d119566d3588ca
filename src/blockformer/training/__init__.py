"""What helps to train a model: parameter groups, AdamW, callbacks, budgets, loss in chunks. Never part of a repo."""
