"""Where the model of a repo of `sentence-transformers` lies: next to `modules.json`, or not."""

import os
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, shown
from .json_files import read_json_value
from .names import MODULES, ROUTER, WEIGHTS, is_inner, module_paths


def model_elsewhere(folder: Path) -> str:
    """Why there is no model next to `modules.json`, where it is, and what to do; "" for every other folder."""
    if not os.path.lexists(folder / MODULES) or _has_model(folder):
        return ""
    modules, router = (_read(folder / name) for name in (MODULES, ROUTER))
    paths = (path for path in module_paths(modules, router) if is_inner(path) and path)
    places = [path for path in paths if _has_model(folder / path) and _is_of_model(folder / path / "config.json")]
    if not places:
        fix = "only models of transformers are converted, and there is none among these modules"
        return "" if os.path.lexists(folder / "config.json") else f"{MODULES}, and no config.json: {fix}"
    there = f"no model next to {MODULES}; it is in {', '.join(map(shown, places))}"
    only = f"convert {folder / places[0]} for the model only"
    if router is not None:
        return f"{there}, one module of a Router: {only}"
    save = f"SentenceTransformer({os.fspath(folder)!r}).save_pretrained(NEW)"
    return f"{there}. {save} puts it there: convert NEW; or {only}"


def _has_model(folder: Path) -> bool:
    names = [name for pair in WEIGHTS for name in pair]
    return os.path.lexists(folder / "config.json") and any(os.path.lexists(folder / name) for name in names)


def _is_of_model(path: Path) -> bool:
    """Whether a file has the settings of a model, and not of a module such as a projection."""
    config = _read(path)
    return isinstance(config, dict) and not {"model_type", "architectures", "vocab_size"}.isdisjoint(config)


def _read(path: Path) -> Any:
    try:
        return read_json_value(path)
    except CheckpointError:
        return None
