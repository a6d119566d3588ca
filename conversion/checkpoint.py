"""Reading a checkpoint folder: which files belong to it, what they hold, one tensor at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorInfo:
    """The header of a stored tensor. `nbytes` counts its data in bytes, `offset` is where it begins in `file`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    offset: int = -1


def read_json(path: str | PathLike[str]) -> dict[str, Any]:
    """A JSON object from a file: UTF-8, no name twice, no NaN or Infinity. Raises `CheckpointError` otherwise."""
    raise NotImplementedError


def nonfinite(tensor: Tensor) -> int:
    """How many NaN or infinite elements a tensor has; 0 for integers."""
    raise NotImplementedError


class Checkpoint:
    """A checkpoint folder, opened: every header checked, no tensor read yet. A context manager.

    Attributes:
        folder: the folder.
        config: `config.json`.
        tensors: name -> `TensorInfo`, in file order.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, folder: str | PathLike[str]):
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        """A private copy of one tensor, bit for bit. Raises `CheckpointError` when the file changed meanwhile."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` when a file of the checkpoint changed since it was opened."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the open file."""

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
