"""The command line."""

from .commands import app
from .entry import main

__all__ = ["app", "main"]
