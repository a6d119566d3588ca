"""The modules of scripts/clients, imported as its runner imports them, and a row as a tool's script prints it."""

import importlib.util
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts" / "clients"


def _load():
    spec = importlib.util.spec_from_file_location("run_clients", SCRIPTS / "__main__.py")
    module = sys.modules["run_clients"] = importlib.util.module_from_spec(spec)
    paths = [*sys.path]
    try:
        spec.loader.exec_module(module)  # puts its own folders there
    finally:
        sys.path[:] = paths
    return module


runner = _load()
accepted, environments, judging, suite = (
    sys.modules[name] for name in ("accepted", "environments", "judging", "common_suite")
)


def row(job="train", model="llama", ours="works", theirs="works", difference=0.0, **more):
    """A row as a client's script prints it."""
    base = {"client": "tool", "version": "1.2", "job": job, "model": model, "ours": ours, "theirs": theirs}
    return {**base, "difference": difference, **more}
