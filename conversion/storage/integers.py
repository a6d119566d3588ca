"""Whole numbers of 4 or 8 bits with scales, as several libraries write them: the plain weights, or AWQ's tensors.

N outputs, K inputs, G groups of inputs that share a scale and a zero point. A weight is (q - z) * scale.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError, shown
from blockformer.files.safetensors_io import HasHeader

from ..rules.groups import Group, Target
from ..rules.operations import Shape
from .awq import PARTS, words_of
from .low_bits import LowBitFormat

PLAIN_INSTEAD = "make plain weights with dequantize (--dequantize bf16)"


class Numbers(NamedTuple):
    """Whole numbers and what they are multiplied by.

    Attributes:
        numbers: [N, K].
        zeros, scales: [N, G].
        groups: the group of each input, [K].
    """

    numbers: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor


def in_order(inputs: int, groups: int) -> Tensor:
    """The group of each input where groups are neighbours, [K]."""
    return torch.arange(inputs) // (inputs // groups)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Words of 32 bits [R, W] -> the first `count` numbers of each row, from 0 on, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[:, :count]


@dataclass(frozen=True)
class Integers(ABC):
    """Tensors that mean a weight [N, K] -> that weight, with no way back.

    Attributes:
        exact: whether it is float32 and not rounded; the libraries round it to the dtype of the scales.
    """

    exact: bool

    @abstractmethod
    def numbers(self, tensors: Sequence[Tensor]) -> Numbers:
        """What the tensors mean."""

    @abstractmethod
    def sizes(self, shapes: Sequence[Shape]) -> tuple[int, int, int]:
        """N, K and G.

        Raises:
            ConversionError: the shapes do not fit together.
        """

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        numbers, zeros, scales, groups = self.numbers(tensors)
        dtype = torch.float32 if self.exact else scales.dtype
        weight = numbers.to(dtype)  # as exact as the difference is: whole numbers of 8 bits
        return [weight.sub_(zeros.to(dtype)[:, groups]).mul_(scales.to(dtype)[:, groups])]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [self.sizes(shapes)[:2]]


@dataclass(frozen=True)
class AsAwq:
    """The same tensors -> AWQ's `qweight`, `qzeros` and `scales` of the same numbers of 4 bits.

    Attributes:
        integers: what they mean.
        name: of the weight, for errors.
    """

    integers: Integers
    name: str

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        numbers, zeros, scales, groups = self.integers.numbers(tensors)
        if not torch.equal(groups, in_order(len(groups), scales.shape[1])):
            raise ConversionError(f"{shown(self.name)}: its groups are not of neighbouring inputs; {PLAIN_INSTEAD}")
        halves = scales.half()
        if not torch.allclose(halves.float(), scales.float(), rtol=0, atol=0, equal_nan=True):
            said = f"{shown(self.name)}: its scales do not fit into float16, which 4-bit layers have"
            raise ConversionError(f"{said}; {PLAIN_INSTEAD}")
        return [words_of(numbers.t()), words_of(zeros.t()), halves.t().contiguous()]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        outputs, inputs, groups = self.integers.sizes(shapes)
        if outputs % 8:
            raise ConversionError(f"{shown(self.name)}: {outputs} outputs do not fill words of 8; {PLAIN_INSTEAD}")
        return [(inputs, outputs // 8), (groups, outputs // 8), (groups, outputs)]


class IntegerFormat(LowBitFormat):
    """Linear maps of whole numbers: families that keep 4 bits keep them, as AWQ's. Others become plain."""

    may_have_4_bits = True
    kept_note = "the 4-bit weights stay, in AWQ's layout; the way back writes that layout"

    def is_there(self, official, names):
        """See `LowBitFormat.is_there`: the config says it, whose absence is another fault."""
        return self.is_told(official)

    def kept_groups(self, checkpoint):
        return [as_awq(group, checkpoint.tensors) for group in self.groups(checkpoint, torch.float32)]


def as_awq(group: Group, tensors: Mapping[str, HasHeader]) -> Group:
    """The group that makes AWQ's tensors in place of a plain weight in a layer; any other group as it is."""
    name = group.targets[0].name
    if not isinstance(group.op, Integers) or not any(part.isdecimal() for part in name.split(".")):
        return group
    op = AsAwq(group.op, name)
    shapes = op.forward_shapes([tuple(tensors[source].shape) for source in group.sources])
    stem = name.removesuffix("weight")
    made = zip(PARTS.items(), shapes, strict=True)
    return Group(group.sources, tuple(Target(stem + part, kind, shape) for (part, kind), shape in made), op)
