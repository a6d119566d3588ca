"""The operations of conversion rules. Most have an inverse, so that one table serves both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError
from blockformer.files.safetensors_io import same_bits

Shape = tuple[int, ...]


class Operation(Protocol):
    """A change of tensors. It maps shapes too, without any data."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Official tensors -> ours; in a plan, what is read -> what is written."""

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes after `forward`. Raises `ConversionError` if it does not apply."""


@runtime_checkable
class Reversible(Operation, Protocol):
    """An operation that can be undone bit for bit."""

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Our tensors -> official."""

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes after `inverse`. Raises `ConversionError` if it does not apply."""


def way_back(op: Operation) -> "Reversed":
    """An operation reversed.

    Raises:
        ConversionError: it cannot be undone.
    """
    if not isinstance(op, Reversible):
        raise ConversionError(f"{type(op).__name__} cannot be reversed")
    return Reversed(op)


@dataclass(frozen=True)
class Identity:
    """The tensors unchanged."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes)

    inverse = forward
    inverse_shapes = forward_shapes


@dataclass(frozen=True)
class Transpose:
    """Swap two axes of every tensor (GPT-2's Conv1D weights are stored [in, out])."""

    dim0: int = 0
    dim1: int = 1

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.transpose(self.dim0, self.dim1).contiguous() for tensor in tensors]

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
class LeadingAxis:
    """Drop the first axis, of length 1, of every tensor (the bias of BART's logits is stored [1, V])."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor[0] for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor[None] for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for shape in shapes:
            if not shape or shape[0] != 1:
                raise ConversionError(f"shape {list(shape)} has no first axis of length 1 to leave out")
        return [tuple(shape[1:]) for shape in shapes]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [(1, *shape) for shape in shapes]


@dataclass(frozen=True)
class Split:
    """Split one tensor along `dim` into parts of the given sizes; the inverse concatenates (GPT-2's c_attn).

    With `groups`, the parts lie side by side in each of so many equal groups, as queries, keys and values of each head
    do in GPT-NeoX.
    """

    dim: int
    sizes: tuple[int, ...]
    groups: int = 1

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        parts = tensor.unflatten(self.dim, (self.groups, -1)).split(self._in_group, dim=self.dim + 1)
        return [part.flatten(self.dim, self.dim + 1).clone() for part in parts]  # no view that keeps the whole

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        parts = [tensor.unflatten(self.dim, (self.groups, -1)) for tensor in tensors]
        return [torch.cat(parts, dim=self.dim + 1).flatten(self.dim, self.dim + 1)]

    @property
    def _in_group(self) -> list[int]:
        return [size // self.groups for size in self.sizes]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        (shape,) = shapes
        if len(shape) <= self.dim or shape[self.dim] != sum(self.sizes):
            raise ConversionError(f"shape {list(shape)} cannot be split into {list(self.sizes)} along axis {self.dim}")
        return [(*shape[: self.dim], size, *shape[self.dim + 1 :]) for size in self.sizes]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        first = shapes[0]
        whole = (*first[: self.dim], sum(self.sizes), *first[self.dim + 1 :])
        if len(first) <= self.dim or self.forward_shapes([whole]) != list(shapes):
            parts = [list(shape) for shape in shapes]
            raise ConversionError(f"shapes {parts} are not parts of sizes {list(self.sizes)} along axis {self.dim}")
        return [whole]


@dataclass(frozen=True)
class EqualParts:
    """Split one tensor along its first axis into so many equal parts, whatever its length; the inverse concatenates."""

    count: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        return [part.clone() for part in tensor.unflatten(0, (self.count, -1))]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors))]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        (shape,) = shapes
        if not shape or shape[0] % self.count:
            raise ConversionError(f"shape {list(shape)} cannot be split into {self.count} equal parts")
        return [(shape[0] // self.count, *shape[1:])] * self.count

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if len(shapes) != self.count or len({tuple(shape) for shape in shapes}) != 1 or not shapes[0]:
            raise ConversionError(f"shapes {[list(shape) for shape in shapes]} are not {self.count} equal parts")
        return [(self.count * shapes[0][0], *shapes[0][1:])]


@dataclass(frozen=True)
class DeinterleaveRotary:
    """Rows whose rotated pairs lie side by side in each head (GPT-J, Cohere) -> rows with all first ones first.

    Rotary positions turn pairs of channels. Which channels make a pair is only a matter of order, and scores do not
    depend on it as long as queries and keys agree.

    Args:
        head_dim: rows of a head.
        rotated: how many of them are turned; the others come after them.
    """

    head_dim: int
    rotated: int

    def _reordered(self, tensor: Tensor, shape: tuple[int, int]) -> Tensor:
        heads = tensor.unflatten(0, (-1, self.head_dim))
        turned = heads[:, : self.rotated].unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return torch.cat((turned, heads[:, self.rotated :]), dim=1).flatten(0, 1)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._reordered(tensor, (-1, 2)) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._reordered(tensor, (2, -1)) for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for shape in shapes:
            if not shape or shape[0] % self.head_dim:
                raise ConversionError(f"shape {list(shape)} does not hold heads of {self.head_dim} rows")
        return list(shapes)

    inverse_shapes = forward_shapes


@dataclass(frozen=True)
class LastFirst:
    """Rows whose last ones, in each head, are turned -> rows with these first.

    Args:
        head_dim: rows of a head.
        last: how many of them come first.
    """

    head_dim: int
    last: int

    def _rolled(self, tensor: Tensor, by: int) -> Tensor:
        return tensor.unflatten(0, (-1, self.head_dim)).roll(by, 1).flatten(0, 1)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._rolled(tensor, self.last) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._rolled(tensor, -self.last) for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return DeinterleaveRotary(self.head_dim, self.last).forward_shapes(shapes)

    inverse_shapes = forward_shapes


@dataclass(frozen=True)
class DeinterleaveRotaryNorms(DeinterleaveRotary):
    """`DeinterleaveRotary` of the weights of a norm of each head, [H, D]."""

    def _reordered(self, tensor: Tensor, shape: tuple[int, int]) -> Tensor:
        return super()._reordered(tensor.flatten(), shape).view_as(tensor)

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes)

    inverse_shapes = forward_shapes


@dataclass(frozen=True)
class StackTensors:
    """`count` tensors of one shape -> one with an axis more, the first."""

    count: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(tensors))]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [part.clone() for part in tensors[0]]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if len(shapes) != self.count or len({tuple(shape) for shape in shapes}) != 1:
            raise ConversionError(f"shapes {[list(shape) for shape in shapes]} cannot be put into one tensor")
        return [(self.count, *shapes[0])]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        (shape,) = shapes
        if not shape or shape[0] != self.count:
            raise ConversionError(f"shape {list(shape)} does not hold {self.count} tensors")
        return [tuple(shape[1:])] * self.count


@dataclass(frozen=True)
class OneByOne:
    """Its own operation for each tensor."""

    ops: tuple[Operation, ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [op.forward([tensor])[0] for op, tensor in zip(self.ops, tensors, strict=True)]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [op.forward_shapes([shape])[0] for op, shape in zip(self.ops, shapes, strict=True)]


@dataclass(frozen=True)
class Each(OneByOne):
    """The same with a way back."""

    ops: tuple[Reversible, ...]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [op.inverse([tensor])[0] for op, tensor in zip(self.ops, tensors, strict=True)]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [op.inverse_shapes([shape])[0] for op, shape in zip(self.ops, shapes, strict=True)]


@dataclass(frozen=True)
class Copies:
    """Reduce `count` copies of a tensor to one. Copies that differ in any bit are refused."""

    count: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        first, *others = tensors
        for other in others:
            if not same_bits(first, other):
                raise ConversionError(
                    "two tensors that must be copies of each other differ; set tie_word_embeddings to false, "
                    "or remove the wrong one"
                )
        return [first]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        return [tensor, *(tensor.clone() for _ in range(self.count - 1))]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if len(shapes) != self.count or len({tuple(shape) for shape in shapes}) != 1:
            raise ConversionError(
                f"shapes {[list(shape) for shape in shapes]} are not {self.count} equal ones, as copies have"
            )
        return [tuple(shapes[0])]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes) * self.count


@dataclass(frozen=True)
class ZeroBias:
    """A weight and its bias -> what an operation makes of the weight; the inverse gives a bias of zero.

    For a layout whose modules all have a bias, of a model whose modules have none.
    """

    op: Reversible

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Never used: a tensor that comes in from such a layout has its bias."""
        raise ConversionError("internal error: a rule of this family cannot read; please report it")

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (weight,) = self.op.inverse(tensors)
        return [weight, weight.new_zeros(weight.shape[-1])]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return self.op.forward_shapes(shapes[:1])

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        (shape,) = self.op.inverse_shapes(shapes)
        return [shape, shape[-1:]]


@dataclass(frozen=True)
class Reversed:
    """An operation reversed: `Reversed(Split(0, (4, 4)))` merges two official tensors into one of ours."""

    op: Reversible

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.op.inverse(tensors)

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.op.forward(tensors)

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return self.op.inverse_shapes(shapes)

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return self.op.forward_shapes(shapes)


@dataclass(frozen=True, init=False)
class Steps:
    """Operations in sequence."""

    ops: tuple[Operation, ...]

    def __init__(self, *ops: Operation):
        object.__setattr__(self, "ops", ops)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for op in self.ops:
            tensors = op.forward(tensors)
        return list(tensors)

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for op in self.ops:
            shapes = op.forward_shapes(shapes)
        return list(shapes)


@dataclass(frozen=True, init=False)
class Chain(Steps):
    """The same with a way back: `Chain(Transpose(), Split(0, (C, C, C)))` takes GPT-2's c_attn apart."""

    ops: tuple[Reversible, ...]

    def __init__(self, *ops: Reversible):
        super().__init__(*ops)

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for op in reversed(self.ops):
            tensors = op.inverse(tensors)
        return list(tensors)

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for op in reversed(self.ops):
            shapes = op.inverse_shapes(shapes)
        return list(shapes)
