"""What helps to train a model: parameter groups, AdamW, callbacks for `Trainer`. Never part of an exported repo."""
