"""Weights of 8 bits (E4M3) in blocks of 128 rows and 128 columns, each with a factor, as DeepSeek publishes them.

N outputs, K inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ConversionError, listed, shown
from ..files.checkpoint import Checkpoint
from ..rules.operations import Chain, Shape
from ..rules.table import Rule
from .awq import FIELD

TRAIT = "fp8"
"""Of the variant of a checkpoint whose linear maps have 8 bits."""
BLOCK = 128
SCALE = "_scale_inv"
"""What the name of a weight's factors ends in, after the weight's own name."""
_WANTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "weight_block_size": ([BLOCK, BLOCK],),
    "scale_fmt": ("float", None),
    "expert_dtype": ("fp8", None),
    "activation_scheme": ("dynamic", None),
}
_FREE = ("dequantize", "modules_to_not_convert")  # the tensors say which weights have 8 bits


@dataclass(frozen=True)
class Fp8:
    """Pairs of a weight [N, K] and its factors [N / 128, K / 128], rounded up -> weights in bfloat16; no way back."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        plain = []
        for weight, scales in zip(tensors[::2], tensors[1::2], strict=True):
            rows, columns = weight.shape
            factors = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
            plain.append((weight.float() * factors).bfloat16())
        return plain

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for weight, scales in zip(shapes[::2], shapes[1::2], strict=True):
            if len(weight) != 2 or tuple(scales) != tuple(-(-size // BLOCK) for size in weight):
                told = f"a weight {list(weight)} and factors {list(scales)}"
                raise ConversionError(f"{told} are not FP8 weights in blocks of {BLOCK} x {BLOCK}")
        return [tuple(shape) for shape in shapes[::2]]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        raise ConversionError("plain weights do not become FP8 weights")

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        raise ConversionError("plain weights do not become FP8 weights")


def check(official: Mapping[str, Any]) -> None:
    """Refuse an official `config.json` that does not tell of such weights.

    Raises:
        ConversionError: the entry is missing, or tells of another kind of FP8.
    """
    entries = official.get(FIELD)
    if not isinstance(entries, Mapping):
        raise ConversionError(f"config.json: {FIELD} is missing, and there are FP8 weights; copy it from the original")
    wrong = [
        f"{name} is {shown(entries.get(name))}, not {' or '.join(map(repr, wanted))}"
        for name, wanted in _WANTED.items()
        if entries.get(name) not in wanted
    ]
    wrong += [f"{shown(name)} is not understood" for name in entries if name not in (*_WANTED, *_FREE)]
    if wrong:
        raise ConversionError(f"config.json: {FIELD}: FP8 weights of this kind cannot be converted:{listed(wrong)}")


def read_plain(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint in a dtype, plain ones in place of those with 8 bits."""
    weights = {}
    for name in checkpoint.tensors:
        if name + SCALE in checkpoint.tensors:
            weights[name] = Fp8().forward([checkpoint.read(name), checkpoint.read(name + SCALE)])[0].to(dtype)
        elif not name.endswith(SCALE):
            weights[name] = checkpoint.read(name).to(dtype)
    return weights


def plain_rules(weights: Iterable[str]) -> list[Rule]:
    """The rules that make plain weights of these."""
    return [from_fp8(Rule(weight, weight)) for weight in weights]


def from_fp8(rule: Rule) -> Rule:
    """A rule for plain weights -> the same for weights of 8 bits."""
    names = (rule.source,) if isinstance(rule.source, str) else rule.source
    sources = tuple(each for name in names for each in (name, name + SCALE))
    dtypes = (torch.float8_e4m3fn, torch.float32) * len(names)
    return replace(rule, source=sources, op=Chain(Fp8(), rule.op), dtypes=dtypes, target_dtype=torch.bfloat16)
