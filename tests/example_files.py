"""The scripts of `examples/` as modules, under their own names: one imports the other."""

import importlib
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    """An example as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def load_forking(name, fresh, folder, monkeypatch):
    """The same; what it runs in fresh processes runs in forks, see `fork_server.py`."""
    example = load(name)

    def run(code, *arguments):
        return json.loads(fresh(code, *arguments, folder=folder))

    monkeypatch.setattr(example, "run_elsewhere", run)
    return example
