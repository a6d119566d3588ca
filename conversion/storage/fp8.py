"""Weights of 8 bits (E4M3) with factors: one for each block of 128 rows and 128 columns (DeepSeek, Qwen3, MiniMax-M2),
or one for the whole matrix (Devstral 2).

Any family may have them: its rules see plain weights, in bfloat16. N outputs, K inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError, listed, shown

from ..rules.groups import Group, Target
from ..rules.operations import Shape
from .low_bits import FIELD, LowBitFormat, wrong_entries

WEIGHT = torch.float8_e4m3fn
FACTORS = (torch.float32, torch.bfloat16, torch.float16, getattr(torch, "float8_e8m0fnu", torch.float32))
BLOCK = 128
SCALE = "_scale_inv"
"""What the name of a weight's factors ends in, after the weight's own name."""
INPUT_SCALE = "activation_scale"
"""The factor of what a matrix is multiplied by, if that has 8 bits too; plain matrices have no use for it."""
_WANTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "weight_block_size": ([BLOCK, BLOCK], None),
    "scale_fmt": ("float", "ue8m0", None),  # powers of two, which DeepSeek-V3.1 stores in float32
    "expert_dtype": ("fp8", None),
    "activation_scheme": ("dynamic", "static", None),
}
_FREE = ("dequantize", "modules_to_not_convert", "ignored_layers", "modules_to_convert")
"""The tensors say which weights have 8 bits."""


@dataclass(frozen=True)
class Fp8:
    """A weight [N, K] and its factors, [N / 128, K / 128] rounded up or a single one -> the weight in bfloat16.

    A third tensor, the scale of the inputs, is not read. Such weights are not written.
    """

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        weight, scales, *_ = tensors
        factors = scales.float()
        if factors.dim() == 2:
            rows, columns = weight.shape
            factors = factors.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return [(weight.float() * factors).bfloat16()]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        weight, scales, *_ = shapes
        if len(weight) != 2 or tuple(scales) not in ((), (1,), tuple(-(-size // BLOCK) for size in weight)):
            told = f"a weight {list(weight)} and factors {list(scales)}"
            raise ConversionError(f"{told} are not FP8 weights in blocks of {BLOCK} x {BLOCK}, nor with one factor")
        return [tuple(weight)]


class _Fp8(LowBitFormat):
    """Matrices of 8 bits, which become bfloat16."""

    method, ending, stored = "fp8", SCALE, WEIGHT
    note = "the FP8 weights have become bfloat16; the way back writes bfloat16 too"
    note_on_paper = "the weights are stored in FP8; conversion makes bfloat16 of them"

    def check(self, official):
        entries = official.get(FIELD)
        if not isinstance(entries, Mapping):
            said = "is missing, and there are FP8 weights; copy it from the original"
            raise ConversionError(f"config.json: {FIELD} {said}")
        if wrong := wrong_entries(entries, _WANTED, _FREE):
            raise ConversionError(f"config.json: {FIELD}: FP8 weights of this kind cannot be converted:{listed(wrong)}")

    def groups(self, tensors, dtype):
        wrong, groups = [], []
        for name in (name for name in tensors if name + SCALE in tensors):
            weight, factors = tensors[name], tensors[name + SCALE]
            if weight.dtype is not WEIGHT or factors.dtype not in FACTORS:
                wrong.append(f"{shown(name)} is {weight.dtype}, its factors are {factors.dtype}")
                continue
            try:
                (shape,) = Fp8().forward_shapes([tuple(weight.shape), tuple(factors.shape)])
            except ConversionError as error:
                wrong.append(f"{shown(name)}: {error}")
                continue
            inputs = name.removesuffix("weight") + INPUT_SCALE
            parts = (name, name + SCALE, *([inputs] if inputs in tensors else []))
            groups.append(Group(parts, (Target(name, torch.bfloat16, shape),), Fp8()))
        if wrong:
            raise ConversionError(f"FP8 weights that cannot be converted ({len(wrong)}):{listed(wrong)}")
        return groups


FP8 = _Fp8()
