"""Pickled weights of modules after the model: a repo has them as safetensors, and the way back pickles them again."""

from pathlib import Path, PurePosixPath

import torch
from safetensors.torch import load_file, save_file

from . import pickled
from .checkpoint import Checkpoint
from .names import MODULE_PICKLE, MODULE_WEIGHTS
from .reasons import UNKNOWN, reason_for


def is_of_module(name: str) -> bool:
    """Whether a file in the folder of a module of sentence-transformers is read, or lies there for a person."""
    path = PurePosixPath(name)
    if any(part.startswith(".") for part in path.parts):
        return False
    return path.name == MODULE_PICKLE or path.suffix in (".json", ".safetensors") or reason_for(name) == UNKNOWN


def safe_name(name: str) -> str:
    """The name of the safetensors file next to the pickled weights of a module."""
    return PurePosixPath(name).with_name(MODULE_WEIGHTS).as_posix()


def as_safetensors(checkpoint: Checkpoint, name: str, path: Path) -> None:
    """Write the tensors of a pickle of the source as a safetensors file."""
    tensors = pickled.load(checkpoint.member(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({each: tensor.clone().contiguous() for each, tensor in tensors.items()}, path)


def as_pickle(source: Path, path: Path) -> None:
    """Write the tensors of a safetensors file as a pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(load_file(source), path)


def hold_the_same(checkpoint: Checkpoint, pickle: str, weights: str) -> bool:
    """Whether a pickle and a safetensors file of the source hold the same tensors."""
    one, other = pickled.load(checkpoint.member(pickle)), load_file(checkpoint.member(weights))
    same = one.keys() == other.keys() and all(one[name].dtype == other[name].dtype for name in one)
    return same and all(torch.equal(one[name], other[name]) for name in one)
