"""The conversion engine: one table of rules, planned from headers alone, run group by group, reversed by code.

A rule says which tensors of the official layout make which tensors of ours, and through which operation. Names may hold
numbered placeholders: `model.layers.{layer}.mlp.up_proj.weight` stands for every layer. Names that come from a checkpoint
are only ever compared; they never become a pattern, a format string or a path.

Shapes are written in the checkpoint's own order of axes.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .errors import ConversionError, listed, shown

Shape = tuple[int, ...]


class Operation(Protocol):
    """A change of tensors that can be undone bit for bit, and that also maps shapes, so headers are known before data."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Official tensors -> ours."""

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Our tensors -> official."""

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Shapes that `forward` makes of these. Raises `ConversionError` where it cannot be applied."""

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Shapes that `inverse` makes of these. Raises `ConversionError` where it cannot be applied."""


class HasHeader(Protocol):
    """What a plan needs to know of a tensor; `TensorInfo` and a `torch.Tensor` both have it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Identity:
    """The tensors as they are."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes)

    inverse = forward
    inverse_shapes = forward_shapes


@dataclass(frozen=True)
class Transpose:
    """Every tensor with two axes swapped (GPT-2's Conv1D weights are stored [in, out])."""

    dim0: int = 0
    dim1: int = 1

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.transpose(self.dim0, self.dim1) for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        swapped = []
        for shape in shapes:
            if len(shape) <= max(self.dim0, self.dim1):
                raise ConversionError(f"shape {list(shape)} has no axes {self.dim0} and {self.dim1} to swap")
            axes = list(shape)
            axes[self.dim0], axes[self.dim1] = axes[self.dim1], axes[self.dim0]
            swapped.append(tuple(axes))
        return swapped

    inverse = forward
    inverse_shapes = forward_shapes


@dataclass(frozen=True)
class Split:
    """One tensor -> several along `dim`, with the given sizes; the way back concatenates them."""

    dim: int
    sizes: tuple[int, ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        return list(tensor.split(list(self.sizes), dim=self.dim))

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors), dim=self.dim)]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        (shape,) = shapes
        if len(shape) <= self.dim or shape[self.dim] != sum(self.sizes):
            raise ConversionError(f"shape {list(shape)} cannot be split into {list(self.sizes)} along axis {self.dim}")
        return [(*shape[: self.dim], size, *shape[self.dim + 1 :]) for size in self.sizes]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        first = shapes[0]
        whole = (*first[: self.dim], sum(self.sizes), *first[self.dim + 1 :])
        if len(first) <= self.dim or self.forward_shapes([whole]) != list(shapes):
            raise ConversionError(
                f"shapes {[list(shape) for shape in shapes]} are not parts of sizes {list(self.sizes)} along axis {self.dim}"
            )
        return [whole]


@dataclass(frozen=True)
class Reversed:
    """An operation the other way round: `Reversed(Split(0, (4, 4)))` merges two official tensors into one of ours."""

    op: Operation

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.op.inverse(tensors)

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.op.forward(tensors)

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return self.op.inverse_shapes(shapes)

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return self.op.forward_shapes(shapes)


@dataclass(frozen=True, init=False)
class Chain:
    """Operations one after the other: `Chain(Transpose(), Split(0, (h, h, h)))` undoes GPT-2's fused c_attn."""

    ops: tuple[Operation, ...]

    def __init__(self, *ops: Operation):
        object.__setattr__(self, "ops", ops)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for op in self.ops:
            tensors = op.forward(tensors)
        return list(tensors)

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for op in reversed(self.ops):
            tensors = op.inverse(tensors)
        return list(tensors)

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for op in self.ops:
            shapes = op.forward_shapes(shapes)
        return list(shapes)

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for op in reversed(self.ops):
            shapes = op.inverse_shapes(shapes)
        return list(shapes)


@dataclass(frozen=True)
class Rule:
    """Official tensors `source` <-> our tensors `target`, through `op`.

    Args:
        source: one name or several, with placeholders such as `{layer}` that stand for one number each.
        target: one name or several, with the same placeholders.
        op: how `source` becomes `target`; it knows its way back.
        any_dtype: the tensor is kept as it is, whatever its dtype (an integer table, say). Otherwise only
            floating-point tensors are taken, and the plan's `dtype` is applied to them.
    """

    source: str | tuple[str, ...]
    target: str | tuple[str, ...]
    op: Operation = field(default_factory=Identity)
    any_dtype: bool = False


@dataclass(frozen=True)
class Target:
    """The header of a tensor that a group will make."""

    name: str
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Group:
    """The smallest piece of a conversion: the tensors `sources`, read together, make the tensors `targets`."""

    sources: tuple[str, ...]
    targets: tuple[Target, ...]
    op: Operation

    def apply(self, read: Callable[[str], Tensor]) -> list[tuple[str, Tensor]]:
        """Read the sources and make the targets, as planned: same names, order, dtypes and shapes."""
        raise NotImplementedError


class RuleTable:
    """The rules of one family.

    Args:
        rules: the rules; each one is used in both directions.
        ignored: names (with placeholders) of official tensors that are dropped deliberately.
    """

    def __init__(self, rules: Iterable[Rule], ignored: Iterable[str] = ()):
        raise NotImplementedError

    def plan(
        self,
        tensors: Mapping[str, HasHeader],
        expected: Mapping[str, Sequence[int]] | None = None,
        *,
        reverse: bool = False,
        optional: Collection[str] = (),
        dtype: torch.dtype | None = None,
    ) -> list[Group]:
        """Groups that convert `tensors`, in their order, from the headers alone.

        Args:
            tensors: name -> header of every tensor of the checkpoint (`Checkpoint.tensors`).
            expected: name -> shape of every tensor that the target model has; None skips these checks.
            reverse: from our layout to the official one.
            optional: names (with placeholders) in `expected` that may stay unfilled: the tied ones.
            dtype: cast floating-point tensors to this; None keeps each tensor's own.

        Raises:
            ConversionError: one error that lists every problem: keys that no rule or several rules take, parts of a
                group that are missing, targets filled twice or not at all or unknown to the model, wrong shapes, a
                dtype that is not floating-point.
        """
        raise NotImplementedError


def check_tied(read: Callable[[str], Tensor], pairs: Iterable[tuple[str, str]]) -> None:
    """Check that tensors which the config calls tied, but which are both stored, are equal bit for bit.

    Raises:
        ConversionError: naming every pair that differs.
    """
    raise NotImplementedError
