"""Weights of 4 bits in the format MXFP4: blocks of 32 numbers that share a power of two.

E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError

from ..rules.operations import Chain, Shape, Transpose
from ..rules.table import Rule

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three of four bits stand for; the upper one is the sign."""


@dataclass(frozen=True)
class Mxfp4:
    """Blocks uint8 [E, rows, n, 16] and scales uint8 [E, rows, n] -> bfloat16 [E, rows, 32 n]; there is no way back.

    A byte holds two numbers, the lower bits the first; a scale is an exponent of 2, less 127.
    """

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        blocks, scales = tensors
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
        weights = torch.empty(*blocks.shape[:-1], 16, 2, dtype=torch.bfloat16)
        for expert, codes in enumerate(blocks):  # one at a time: the indices take eight bytes a number
            numbers = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1)
            weights[expert] = torch.ldexp(numbers, scales[expert].int()[..., None, None] - 127)
        return [weights.flatten(-3)]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        blocks, scales = shapes
        if len(blocks) != 4 or blocks[3] != 16 or tuple(blocks[:3]) != tuple(scales):
            raise ConversionError(f"blocks {list(blocks)} and scales {list(scales)} are not MXFP4 weights")
        return [(*blocks[:2], blocks[2] * 32)]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        raise ConversionError("plain weights do not become MXFP4 weights")

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        raise ConversionError("plain weights do not become MXFP4 weights")


def rule(weight: str) -> Rule:
    """The rule that makes the transposed matrices of all experts of their blocks and scales, in bfloat16."""
    parts = (f"{weight}_blocks", f"{weight}_scales")
    dtypes = (torch.uint8, torch.uint8)
    return Rule(parts, weight, Chain(Mxfp4(), Transpose(1, 2)), dtypes=dtypes, target_dtype=torch.bfloat16)
