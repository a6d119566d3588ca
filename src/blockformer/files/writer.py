"""Write a model's weights: safetensors shards, one tensor at a time."""

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from .errors import ConversionError, shown
from .json_files import json_text
from .safetensors_io import SafetensorsWriter
from .sizes import parse_size

Planned = tuple[str, torch.dtype, Sequence[int]]
"""Name, dtype and shape of a tensor to write."""


def _shards(planned: list[Planned], limit: int) -> list[list[Planned]]:
    """The planned tensors in order, grouped up to `limit` bytes; a larger tensor gets its own group."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        nbytes = _nbytes(tensor)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    return shards


def _nbytes(planned: Planned) -> int:
    return math.prod(planned[2]) * planned[1].itemsize


class ShardWriter:
    """Write safetensors shards in planned order, one tensor at a time.

    One shard is `model.safetensors`; several are `model-0000i-of-0000n.safetensors` and `model.safetensors.index.json`.
    A context manager: leaving it finishes the files; on an error it only closes them.

    Args:
        folder: an existing folder.
        planned: every tensor, in the order of the `write_parts` calls.
        max_shard_size: bytes of data ("5GB", 5_000_000_000) at which a new shard begins; a larger tensor gets its own.

    Attributes:
        files: names of the weight files.

    Raises:
        ConversionError: nothing planned, a repeated name, an unsupported dtype, or too little disk space.
    """

    def __init__(self, folder: str | PathLike[str], planned: Iterable[Planned], max_shard_size: int | str = "5GB"):
        self.folder = Path(folder)
        tensors = list(planned)
        if not tensors:
            raise ConversionError(f"{self.folder}: there are no tensors to write")
        if len({name for name, _, _ in tensors}) < len(tensors):
            raise ConversionError(f"{self.folder}: a tensor name is planned twice")
        shards = _shards(tensors, parse_size(max_shard_size))
        many = len(shards) > 1
        self.files = [
            f"model-{i:05}-of-{len(shards):05}.safetensors" if many else "model.safetensors"
            for i in range(1, len(shards) + 1)
        ]
        self._total = sum(map(_nbytes, tensors))
        disk = shutil.disk_usage(self.folder)
        if disk.total and disk.free < self._total:
            raise ConversionError(f"{self.folder}: {self._total} bytes are needed, {disk.free} are free on this disk")
        self._order = iter(
            [(file, name) for file, shard in zip(self.files, shards, strict=True) for name, _, _ in shard]
        )
        self._plans = dict(zip(self.files, shards, strict=True))
        self._weight_map: dict[str, str] = {}
        self._file: SafetensorsWriter | None = None

    def write_parts(self, name: str, parts: Iterable[Tensor]) -> None:
        """Write the next planned tensor from its elements in order; the parts must add up to the planned size."""
        self._file_of(name).write_parts(name, parts)

    def _file_of(self, name: str) -> SafetensorsWriter:
        """The file for the next planned tensor; the file before it is finished."""
        file, expected = next(self._order, ("", None))
        if name != expected:
            raise ConversionError(f"{self.folder}: {shown(name)} was written where {shown(expected)} was planned")
        path = self.folder / file
        if self._file is None or self._file.path != path:
            if self._file is not None:
                self._file.finish()
            self._file = SafetensorsWriter(path, self._plans[file])
        self._weight_map[name] = file
        return self._file

    def close(self) -> None:
        """Sync and close the files, and write the index.

        Raises:
            ConversionError: planned tensors were not written.
        """
        file, missing = next(self._order, (None, None))
        if file is not None:
            raise ConversionError(f"{self.folder}: planned tensors were not written, {shown(missing)} is the first")
        if self._file is None:
            return
        self._file.finish()
        self._file = None
        if len(self.files) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
            with open(self.folder / "model.safetensors.index.json", "x", encoding="utf-8") as out:
                out.write(json_text(index))
                out.flush()
                os.fsync(out.fileno())

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            if self._file is not None:
                self._file.abandon()
