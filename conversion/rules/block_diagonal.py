"""Convolutions in groups as matrices of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError

from .operations import Shape


@dataclass(frozen=True)
class BlockDiagonal:
    """The weight of a convolution of width 1 in groups, [O, I / groups, 1] -> a matrix [O, I], zeros around blocks."""

    groups: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.block_diag(*tensor.squeeze(-1).chunk(self.groups)) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        made = []
        for tensor in tensors:
            rows, columns = (size // self.groups for size in tensor.shape)
            blocks = [tensor.split(rows)[i].split(columns, dim=1)[i] for i in range(self.groups)]
            if not torch.equal(torch.block_diag(*blocks), tensor):
                raise ConversionError(
                    f"a matrix is not zero outside of its {self.groups} blocks, which is all that this family's layout "
                    "holds; after training, write it as a family with whole matrices, such as bert"
                )
            made.append(torch.cat(blocks)[..., None])
        return made

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for shape in shapes:
            if len(shape) != 3 or shape[-1] != 1 or shape[0] % self.groups:
                raise ConversionError(f"shape {list(shape)} is not that of a convolution in {self.groups} groups")
        return [(shape[0], shape[1] * self.groups) for shape in shapes]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for shape in shapes:
            if len(shape) != 2 or any(size % self.groups for size in shape):
                raise ConversionError(f"shape {list(shape)} cannot be cut into {self.groups} blocks")
        return [(shape[0], shape[1] // self.groups, 1) for shape in shapes]
