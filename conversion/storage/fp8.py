"""Weights of 8 bits (E4M3) with factors: one for each block, usually of 128 rows and 128 columns (DeepSeek, Qwen3,
MiniMax-M2), one for each row, or one for the whole matrix (Devstral 2).

transformers, compressed-tensors (`compressed.py`) and ModelOpt write them under different names. Any family may have
them: its rules see plain weights, in bfloat16. N outputs, K inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.safetensors_io import HasHeader

from ..rules.groups import Group, Target
from ..rules.operations import Shape
from .low_bits import FIELD, NOT_READ, LowBitFormat, also_rounded, refuse, wrong_entries

WEIGHT = torch.float8_e4m3fn
FACTORS = (torch.float32, torch.bfloat16, torch.float16, getattr(torch, "float8_e8m0fnu", torch.float32))
BLOCK = (128, 128)
"""Rows and columns of a block where nobody says it."""
_WANTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "scale_fmt": ("float", "ue8m0", None),  # powers of two, which DeepSeek-V3.1 stores in float32
    "expert_dtype": ("fp8", None),
    "activation_scheme": ("dynamic", "static", None),
}
_FREE = ("weight_block_size", "dequantize", "modules_to_not_convert", "ignored_layers", "modules_to_convert")
"""The tensors say which weights have 8 bits."""


@dataclass(frozen=True)
class Fp8:
    """A weight [N, K] and its factors, one a block, [N], [N, 1] or a single one -> plain, in bfloat16.

    Such weights are not written.

    Attributes:
        block: rows and columns of one.
    """

    block: tuple[int, int] = BLOCK

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        weight, scales = tensors
        factors, (rows, columns) = scales.float(), weight.shape
        factors = factors[:, None] if factors.shape == (rows,) else factors
        if factors.dim() == 2 and factors.shape != (rows, 1):
            for axis, size in enumerate(self.block):
                factors = factors.repeat_interleave(size, axis)
            factors = factors[:rows, :columns]
        return [(weight.float() * factors).bfloat16()]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        weight, scales = shapes
        blocks = tuple(-(-size // length) for size, length in zip(weight, self.block, strict=False))
        if len(weight) != 2 or tuple(scales) not in ((), (1,), (weight[0],), (weight[0], 1), blocks):
            said = f"a weight {list(weight)} and factors {list(scales)} are not FP8 weights"
            kind = " x ".join(map(str, self.block))
            raise ConversionError(f"{said} in blocks of {kind}, nor with one factor, nor with one a row")
        return [tuple(weight)]


def as_block(size: Any) -> tuple[int, int] | None:
    """The rows and columns of a block as a `config.json` says them; None where it does so in another way."""
    is_block = isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)
    return (size[0], size[1]) if is_block else None


def fp8_groups(
    names: Iterable[str], ending: str, block: tuple[int, int], tensors: Mapping[str, HasHeader]
) -> list[Group]:
    """What makes plain weights of FP8 ones.

    Args:
        names: of the weights.
        ending: what the names of their factors end in.
        block: rows and columns of one.
        tensors: name -> header of every tensor.

    Raises:
        ConversionError: naming all that do not fit.
    """
    wrong, groups, op = [], [], Fp8(block)
    for name in names:
        weight, factors = tensors[name], tensors[name + ending]
        if weight.dtype is not WEIGHT or factors.dtype not in FACTORS:
            wrong.append(f"{shown(name)} is {weight.dtype}, its factors are {factors.dtype}")
            continue
        try:
            (shape,) = op.forward_shapes([tuple(weight.shape), tuple(factors.shape)])
        except ConversionError as error:
            wrong.append(f"{shown(name)}: {error}")
            continue
        groups.append(Group((name, name + ending), (Target(name, torch.bfloat16, shape),), op))
    if wrong:
        raise ConversionError(f"FP8 weights that cannot be converted ({len(wrong)}):{listed(wrong)}")
    return groups


class _Fp8(LowBitFormat):
    """Matrices of 8 bits, which become bfloat16; a factor for their inputs, if these have 8 bits too, is not read."""

    method, ending, stored = "fp8", "_scale_inv", (WEIGHT,)
    not_read: tuple[str, ...] = (".activation_scale",)
    note = "the FP8 weights have become bfloat16; the way back writes bfloat16 too"
    note_on_paper = "the weights are stored in FP8; conversion makes bfloat16 of them"

    def check(self, official):
        entries = official.get(FIELD)
        if not isinstance(entries, Mapping):
            said = "is missing, and there are FP8 weights; copy it from the original"
            raise ConversionError(f"config.json: {FIELD} {said}")
        wrong, block = wrong_entries(entries, _WANTED, _FREE), entries.get("weight_block_size")
        if block is not None and as_block(block) is None:
            wrong.append(f"weight_block_size is {shown(block)}, not two positive integers")
        refuse(wrong, "FP8 ")

    def groups(self, checkpoint, dtype, exact=False):
        block = as_block(checkpoint.config[FIELD].get("weight_block_size")) or BLOCK
        names = [name for name in checkpoint.tensors if name + self.ending in checkpoint.tensors]
        return fp8_groups(names, self.ending, block, checkpoint.tensors)


class _ModelOpt(_Fp8):
    """FP8 weights as ModelOpt writes them, with one factor a matrix or a row. Its other formats are not read."""

    method, ending, not_read = "modelopt", "_scale", NOT_READ

    def is_there(self, official, names):
        """See `LowBitFormat.is_there`: the config says it, whose absence is another fault."""
        return self.is_told(official)

    def check(self, official):
        entries = official[FIELD]
        wanted = {"quant_algo": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")}
        refuse(wrong_entries(entries, wanted, [*entries]), "ModelOpt's ")

    def notes(self, official, kept=False):
        entries = official[FIELD]
        cache = entries.get("kv_cache_scheme") or entries.get("kv_cache_quant_algo")
        return [self.note, *also_rounded(True, bool(cache))]


FP8, MODELOPT = _Fp8(), _ModelOpt()
