"""Tensors that lie in several files, a piece from each process of a training run, read as whole ones."""

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockformer.files.errors import CheckpointError, shown
from blockformer.files.regular import open_regular
from blockformer.files.safetensors_io import TensorInfo, read_tensor


@dataclass(frozen=True)
class Piece:
    """A part of a tensor.

    Attributes:
        info: its own header: its shape, and where its data begins.
        begin: where it lies in the whole tensor: an index for each axis.
        saved: bytes from there on that hold the piece as `torch.save` writes one; 0: its plain data.
    """

    info: TensorInfo
    begin: tuple[int, ...]
    saved: int = 0

    def read(self) -> Tensor:
        """The piece.

        Raises:
            CheckpointError: the file is damaged, or holds another tensor.
        """
        with open_regular(self.info.file) as file:
            if not self.saved:
                return read_tensor(file, self.info)
            file.seek(self.info.offset)
            data = io.BytesIO(file.read(self.saved))
        try:
            tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{self.info.file}: {shown(self.info.name)} is damaged; save it again") from error
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (self.info.shape, self.info.dtype):
            raise CheckpointError(f"{self.info.file}: {shown(self.info.name)} is not what the table of contents says")
        return tensor.detach()


@dataclass(frozen=True)
class Pieced:
    """A tensor of several pieces.

    Attributes:
        info: the header of the whole.
        pieces: its parts.
    """

    info: TensorInfo
    pieces: tuple[Piece, ...]

    def read(self) -> Tensor:
        """The whole tensor; one piece at a time is in memory twice."""
        whole = torch.empty(self.info.shape, dtype=self.info.dtype)
        for piece in self.pieces:
            place = tuple(slice(first, first + size) for first, size in zip(piece.begin, piece.info.shape, strict=True))
            whole[place] = piece.read()
        return whole

    @property
    def files(self) -> set[Path]:
        """Where the pieces lie."""
        return {piece.info.file for piece in self.pieces}


def pieced(name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[Piece]) -> Pieced:
    """A tensor of pieces that cover it.

    Raises:
        CheckpointError: they leave a hole, overlap, or lie outside it.
    """
    parts = tuple(pieces)
    whole = torch.Size(shape).numel()
    covered = sum(torch.Size(part.info.shape).numel() for part in parts)
    inside = all(
        len(part.begin) == len(part.info.shape) == len(shape)
        and all(a + b <= c for a, b, c in zip(part.begin, part.info.shape, shape, strict=True))
        for part in parts
    )
    if (
        covered != whole
        or not inside
        or len({part.begin for part in parts if part.info.nbytes}) < len([part for part in parts if part.info.nbytes])
    ):
        raise CheckpointError(
            f"{shown(name)}: its parts hold {covered} of {whole} elements: parts of some processes are missing"
        )
    first = parts[0].info.file if parts else Path(os.devnull)
    return Pieced(TensorInfo(name, dtype, shape, first), parts)
