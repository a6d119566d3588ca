"""Writing a model folder: shards one tensor at a time, and a folder that appears whole or not at all."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

Planned = tuple[str, torch.dtype, Sequence[int]]


def parse_size(size: int | str) -> int:
    """Bytes of "5GB", "200MB", "1.5GiB" or a plain number. Raises `ConversionError` for anything else."""
    raise NotImplementedError


class ShardWriter:
    """Writes safetensors shards, in planned order, one tensor at a time. A context manager; leaving it finishes the files.

    One shard is `model.safetensors`; several are `model-0000i-of-0000n.safetensors` with `model.safetensors.index.json`.

    Args:
        folder: an existing folder.
        planned: (name, dtype, shape) of every tensor, in the order in which `write` will be called.
        max_shard_size: bytes ("5GB", 5_000_000_000) of data after which a new shard begins; a larger tensor gets its own.
    """

    def __init__(self, folder: str | PathLike[str], planned: Iterable[Planned], max_shard_size: int | str = "5GB"):
        raise NotImplementedError

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next planned tensor; name, dtype and shape must be as planned."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish: every planned tensor must have been written; files synced; the index written."""
        raise NotImplementedError

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...


@contextmanager
def atomic_folder(
    target: str | PathLike[str], force: bool = False, sources: Iterable[str | PathLike[str]] = ()
) -> Iterator[Path]:
    """A temporary sibling folder to fill, which becomes `target` in one step when the block ends well.

    Args:
        target: the folder to make.
        force: replace an existing folder (whole: the old one or the new one is there, at every moment).
        sources: folders that are being read; a target that is, holds, lies in or is hard-linked to one is refused.

    Raises:
        ConversionError: the target cannot be used, or writing failed; the old target is untouched then.
    """
    raise NotImplementedError
    yield
