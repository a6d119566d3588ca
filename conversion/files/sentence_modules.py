"""What `sentence-transformers` puts after a model: pooling, a projection, a mask for late interaction."""

import os
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..errors import shown
from . import pickled
from .checkpoint import Checkpoint
from .json_files import read_json, read_json_value
from .names import SENTENCE_FILES
from .regular import open_regular
from .safetensors_io import read_header

MODULES = ("Transformer", "Pooling", "Normalize", "Dense", "MultiVectorMask", "LogitScore")
PACKAGES = ("sentence_transformers.", "pylate.models.")
FOLDER = re.compile(r"[0-9]{1,2}_[A-Za-z]{1,40}")
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"


def sentence_files(checkpoint: Checkpoint, target: Path) -> tuple[tuple[str, ...], str]:
    """The files of `sentence-transformers` to copy, and why they are left out if they are.

    `modules.json` can name any class to load, so only known classes of the library itself are accepted. A projection
    that is pickled is written as safetensors.

    Args:
        checkpoint: the source.
        target: an existing folder.
    """
    if not os.path.lexists(checkpoint.folder / "modules.json"):
        return (), ""
    modules = read_json_value(checkpoint.member("modules.json"))
    modules = modules if isinstance(modules, list) else [None]
    if problem := next(filter(None, (_problem(checkpoint, module) for module in modules)), ""):
        return (), f"modules.json: {problem}; sentence-transformers' files are left out"
    names = [name for name in SENTENCE_FILES if "*" not in name]
    for module in modules:
        folder = module["path"]
        names += [f"{folder}/config.json"] if folder else []
        if not _is_projection(module):
            continue
        if os.path.lexists(checkpoint.folder / folder / WEIGHTS):
            with open_regular(checkpoint.member(f"{folder}/{WEIGHTS}")) as file:
                read_header(file, checkpoint.folder / folder / WEIGHTS)
            names.append(f"{folder}/{WEIGHTS}")
        else:
            tensors = pickled.load(checkpoint.member(f"{folder}/{PICKLE}"))
            (target / folder).mkdir(exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / folder / WEIGHTS)
    return tuple(names), ""


def _is_projection(module: dict[str, Any]) -> bool:
    return module["type"].endswith(".Dense")


def _problem(checkpoint: Checkpoint, module: Any) -> str:
    """Why an entry of `modules.json` is not one to copy; "" for a good one."""
    kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
    if not isinstance(kind, str) or not kind.startswith(PACKAGES) or kind.rpartition(".")[2] not in MODULES:
        return f"module {shown(kind)} is not known"
    if folder != "" and not (isinstance(folder, str) and FOLDER.fullmatch(folder)):
        return f"{shown(kind)} in {shown(folder)}"
    if not _is_projection(module):
        return ""
    files = {path.name for path in (checkpoint.folder / folder).glob("*")} if folder else set()
    if "config.json" not in files or not files & {WEIGHTS, PICKLE}:
        return f"{shown(folder)} has no config.json or no weights"
    # sentence-transformers imports and calls what this names, where code is trusted.
    act = read_json(checkpoint.member(f"{folder}/config.json")).get("activation_function", "torch.nn.")
    return "" if str(act).startswith("torch.nn.") else f"activation_function {shown(act)} in {folder}"
