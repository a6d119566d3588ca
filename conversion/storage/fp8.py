"""Weights of 8 bits (E4M3) in blocks of 128 rows and 128 columns, each with a factor: DeepSeek, Qwen3, MiniMax-M2.

Any family may have them: its rules see plain weights, in bfloat16. N outputs, K inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.safetensors_io import HasHeader

from ..rules.operations import Shape
from ..rules.table import Group, Target
from .awq import FIELD, without

METHOD = "fp8"
WEIGHT = torch.float8_e4m3fn
FACTORS = (torch.float32, torch.bfloat16, torch.float16)
NOTE = "the FP8 weights have become bfloat16; the way back writes bfloat16 too"
NOTE_ON_PAPER = "the weights are stored in FP8; conversion makes bfloat16 of them"
FURTHER = "num_nextn_predict_layers"
"""The official entry of layers that predict further tokens."""
BLOCK = 128
SCALE = "_scale_inv"
"""What the name of a weight's factors ends in, after the weight's own name."""
_WANTED: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "fmt": ("e4m3", "float8_e4m3fn", None),
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
            factors = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
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


def _check(official: Mapping[str, Any]) -> None:
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


class PlainView:
    """The names, headers and tensors of a checkpoint as if its weights of 8 bits were plain, whatever its family.

    Args:
        checkpoint: whose `config.json` tells of such weights. The tensors say which they are.

    Attributes:
        tensors: name -> header; of weights of 8 bits in bfloat16, without their factors.
        entries: the `config.json` of the plain checkpoint. The layers that predict further tokens do not go back out.

    Raises:
        ConversionError: the entry is missing, or tells of another kind of FP8.
    """

    def __init__(self, checkpoint: Checkpoint):
        _check(checkpoint.config)
        self._checkpoint = checkpoint
        stored = checkpoint.tensors
        self._low = [name for name in stored if name + SCALE in stored]
        factors = {name + SCALE for name in self._low}
        plain = {group.targets[0].name: group.targets[0] for group in self.groups}
        self.tensors: Mapping[str, HasHeader] = {
            name: plain.get(name, info) for name, info in stored.items() if name not in factors
        }
        self.entries = plain_entries(checkpoint.config)

    @property
    def groups(self) -> list[Group]:
        """What makes the plain weights, one by one.

        Raises:
            ConversionError: weights and factors do not fit together.
        """
        stored, wrong, groups = self._checkpoint.tensors, [], []
        for name in self._low:
            weight, factors = stored[name], stored[name + SCALE]
            if weight.dtype is not WEIGHT or factors.dtype not in FACTORS:
                wrong.append(f"{shown(name)} is {weight.dtype}, its factors are {factors.dtype}")
                continue
            try:
                (shape,) = Fp8().forward_shapes([tuple(weight.shape), tuple(factors.shape)])
            except ConversionError as error:
                wrong.append(f"{shown(name)}: {error}")
                continue
            groups.append(Group((name, name + SCALE), (Target(name, torch.bfloat16, shape),), Fp8()))
        if wrong:
            raise ConversionError(f"FP8 weights that cannot be converted ({len(wrong)}):{listed(wrong)}")
        return groups

    def read(self, name: str) -> Tensor:
        """A tensor, plain."""
        read = self._checkpoint.read
        return Fp8().forward([read(name), read(name + SCALE)])[0] if name in {*self._low} else read(name)

    def check(self, names: Iterable[str]) -> None:
        """Refuse weights of 8 bits without their factors among these, which the model would take.

        Raises:
            ConversionError: naming them.
        """
        lacking = [f"{shown(name)}: needs {name}{SCALE}" for name in names if self.tensors[name].dtype is WEIGHT]
        if lacking:
            raise ConversionError(f"FP8 weights: parts that are missing ({len(lacking)}):{listed(lacking)}")


def is_told(official: Mapping[str, Any]) -> bool:
    """Whether an official `config.json` tells of weights of 8 bits in blocks, or of some other FP8."""
    entries = official.get(FIELD)
    return isinstance(entries, Mapping) and entries.get("quant_method") == METHOD


def has_factors(names: Iterable[str]) -> bool:
    """Whether some of these are names of factors."""
    return any(name.endswith(SCALE) for name in names)


def plain_entries(official: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the plain checkpoint; without weights in FP8, the same.

    Raises:
        ConversionError: it tells of another kind of FP8.
    """
    if not is_told(official):
        return dict(official)
    _check(official)
    further = {FURTHER: 0} if FURTHER in official else {}
    return {**without(official), **further}


def read_plain(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint in a dtype, plain ones in place of those with 8 bits."""
    plain = PlainView(checkpoint)
    return {name: plain.read(name).to(dtype) for name in plain.tensors}
