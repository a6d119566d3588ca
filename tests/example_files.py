"""The scripts of `examples/` as modules, under their own names: one imports the other."""

import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    """An example as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)
