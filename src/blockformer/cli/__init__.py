"""The command line."""

from .commands import app, main

__all__ = ["app", "main"]
