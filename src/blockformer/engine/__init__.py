"""Quick ways for one kind of processor. They plug into the model from outside; no published repo carries them."""

from .prepare import plug_in, prepare_for_inference, prepare_for_training

__all__ = ["plug_in", "prepare_for_inference", "prepare_for_training"]
