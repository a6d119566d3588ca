"""Weights of 4 bits in the format MXFP4: blocks of 32 numbers that share a power of two.

E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError, shown

from ..rules.groups import groups_of
from ..rules.operations import Shape, Steps, Transpose
from .low_bits import FIELD, LowBitFormat

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three of four bits stand for; the upper one is the sign."""


@dataclass(frozen=True)
class Mxfp4:
    """Blocks uint8 [E, rows, n, 16] and scales uint8 [E, rows, n] -> bfloat16 [E, rows, 32 n], with no way back.

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


class _Mxfp4(LowBitFormat):
    """Matrices of all experts, stored transposed, which become bfloat16. The official class reads them by itself."""

    method, ending = "mxfp4", "_blocks"
    note = "the experts' MXFP4 weights have become bfloat16; the way back writes bfloat16 too"
    note_on_paper = "the experts' weights are stored in MXFP4; conversion makes bfloat16 of them"

    def check(self, official):
        if not self.is_told(official):
            raise ConversionError(f"config.json: {FIELD} is {shown(official.get(FIELD))}, and the experts are in MXFP4")

    def to_load(self, official):
        return {**official, FIELD: {**official[FIELD], "dequantize": True}}

    def groups(self, checkpoint, dtype, exact=False):
        tensors = checkpoint.tensors
        stems = dict.fromkeys(name.removesuffix(self.ending) for name in tensors if name.endswith(self.ending))
        weights = {stem: (f"{stem}_blocks", f"{stem}_scales") for stem in stems}
        op = Steps(Mxfp4(), Transpose(1, 2))
        return groups_of(weights, op, (torch.uint8, torch.uint8), torch.bfloat16, tensors)


MXFP4 = _Mxfp4()
