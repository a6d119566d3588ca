"""Conversion between official checkpoints and Blockformer's layout: strict, streaming, atomic, exact both ways."""

import importlib
from typing import TYPE_CHECKING

from blockformer.files.errors import CheckpointError, ConversionError

if TYPE_CHECKING:
    from blockformer.files.checkpoint import Checkpoint, TensorInfo

    from .converting import convert, from_official
    from .exporting import export_folder
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

# The modules of names that need torch, imported when one is used. No module here bears the name of a function.
_MODULES = {
    "Checkpoint": "files.checkpoint",
    "ConversionReport": "report",
    "TensorInfo": "files.checkpoint",
    "convert": "converting",
    "export_folder": "exporting",
    "from_official": "converting",
}


def __getattr__(name):
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__():
    return sorted({*globals(), *__all__})
