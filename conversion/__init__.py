"""Conversion between official checkpoints and Blockformer's layout: strict, streaming, atomic, exact both ways."""

from .convert import convert, from_official
from .errors import CheckpointError, ConversionError
from .export_folder import export_folder
from .files.checkpoint import Checkpoint, TensorInfo
from .report import ConversionReport

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
