"""The model: flat files that need only torch and transformers, which a published repo carries as they are."""
