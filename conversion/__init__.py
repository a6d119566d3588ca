"""Conversion between official checkpoints and Blockformer's layout: strict, streaming, atomic, exact both ways."""

from .checkpoint import Checkpoint, TensorInfo
from .errors import CheckpointError, ConversionError

__all__ = ["Checkpoint", "CheckpointError", "ConversionError", "TensorInfo"]
