"""Conversion between official checkpoints and Blockformer's layout: strict, streaming, atomic, exact both ways."""

from .checkpoint import Checkpoint, TensorInfo
from .convert import ConversionReport, convert, export_folder, from_official
from .errors import CheckpointError, ConversionError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConversionError",
    "ConversionReport",
    "TensorInfo",
    "convert",
    "export_folder",
    "from_official",
]
