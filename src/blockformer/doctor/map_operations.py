"""The operations that a file of names may ask for, by the words that it has for them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockformer.conversion.rules.operations import (
    DeinterleaveRotary,
    OneByOne,
    Operation,
    Reversed,
    Shape,
    Split,
    StackTensors,
    Steps,
    Transpose,
)
from blockformer.files.errors import ConversionError, shown


@dataclass(frozen=True)
class Scale:
    """Tensors multiplied by a number, in float32: a factor of the user's code that the family's model lacks."""

    factor: float

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [(tensor.float() * self.factor).to(tensor.dtype) for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes)


@dataclass(frozen=True)
class Add:
    """A number added to tensors, in float32: norms that are stored as their distance from 1."""

    number: float

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [(tensor.float() + self.number).to(tensor.dtype) for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(shapes)


@dataclass(frozen=True)
class Squeeze:
    """Tensors without their axes of length 1: convolutions of width 1, parameters of shape [1, 1, C]."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.squeeze() for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [tuple(size for size in shape if size != 1) for shape in shapes]


@dataclass(frozen=True)
class Constant:
    """Tensors of one number, made of none: a bias of zeros, a norm of ones."""

    number: float
    shapes: tuple[Shape, ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.full(shape, self.number) for shape in self.shapes]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return list(self.shapes)


@dataclass(frozen=True)
class Place:
    """Where an operation stands.

    Attributes:
        shapes: of the tensors that it is given.
        targets: of the tensors that the whole entry makes, as the model has them.
        config: of the model.
    """

    shapes: tuple[Shape, ...]
    targets: tuple[Shape, ...]
    config: PretrainedConfig


def steps_of(asked: Sequence[Any], shapes: Sequence[Shape], targets: Sequence[Shape], config: Any) -> Steps:
    """The operations of an entry, one after the other.

    Args:
        asked: a word, or an object of one word and its argument, for each.
        shapes: of the entry's sources.
        targets: of what it makes, as the model has them.
        config: of the model.

    Raises:
        ConversionError: one is unknown, has a wrong argument, or does not apply to these shapes.
    """
    ops = []
    for each in asked:
        word, given = word_of(each)
        op = KNOWN[word](given, Place(tuple(shapes), tuple(targets), config))
        try:
            shapes = op.forward_shapes(shapes)
        except ValueError as error:
            raise ConversionError(f"{word}: {error}") from error
        ops.append(op)
    return Steps(*ops)


def word_of(asked: Any) -> tuple[str, Any]:
    """The word of an operation, and its argument; None if it has none.

    Raises:
        ConversionError: it is not one of `KNOWN`.
    """
    entries = {asked: None} if isinstance(asked, str) else asked
    word, given = next(iter(entries.items())) if isinstance(entries, dict) and len(entries) == 1 else ("", None)
    if word not in KNOWN:
        raise ConversionError(f"unknown operation {shown(asked)}; there are {', '.join(KNOWN)}")
    return word, given


def words_in(asked: Sequence[Any]) -> None:
    """Check the words of operations, and of those inside `each`.

    Raises:
        ConversionError: one is unknown.
    """
    for one in asked:
        word, given = word_of(one)
        for inner in given if word == "each" and isinstance(given, list) else []:
            words_in(_list_of(inner))


def _list_of(asked: Any) -> list[Any]:
    """The operations for one tensor: none, one, or several."""
    return [] if asked is None else asked if isinstance(asked, list) else [asked]


def _number(given: Any, word: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ConversionError(f'{word} needs a number, as in {{"{word}": 0.5}}, not {shown(given)}')
    return float(given)


def _settings(given: Any, word: str, **usual: int) -> dict[str, int]:
    """Whole numbers by name, over the usual ones."""
    found = {} if given is None else given
    if not isinstance(found, dict) or not {*found} <= {*usual}:
        raise ConversionError(f"{word} takes {', '.join(usual)}, not {shown(given)}")
    for name, value in found.items():
        if type(value) is not int or value < (0 if name == "axis" else 1):
            raise ConversionError(f"{word}: {name} must be a whole number, not {shown(value)}")
    return {**usual, **found}


def _parts(given: Any, word: str, sizes: Callable[[int], list[int]]) -> Split:
    """A split into parts of these sizes along the axis, side by side in each of the groups."""
    settings = _settings(given, word, axis=0, groups=1)
    axis, groups = settings["axis"], settings["groups"]
    lengths = sizes(axis)
    if wrong := [size for size in lengths if size % groups]:
        raise ConversionError(f"{word}: parts of {wrong[0]} do not lie in {groups} equal groups")
    return Split(axis, tuple(lengths), groups)


def _lengths(shapes: Sequence[Shape], axis: int, word: str) -> list[int]:
    if any(len(shape) <= axis for shape in shapes):
        raise ConversionError(f"{word}: shapes {[list(shape) for shape in shapes]} have no axis {axis}")
    return [shape[axis] for shape in shapes]


def _split(given: Any, place: Place) -> Operation:
    if len(place.shapes) != 1:
        raise ConversionError(f"split takes one tensor, not {len(place.shapes)}")
    return _parts(given, "split", lambda axis: _lengths(place.targets, axis, "split"))


def _join(given: Any, place: Place) -> Operation:
    return Reversed(_parts(given, "join", lambda axis: _lengths(place.shapes, axis, "join")))


def _rotary(given: Any, place: Place, word: str) -> DeinterleaveRotary:
    size = getattr(place.config, "head_dim", None)
    usual = {} if size is None else {"head_dim": size}
    found = _settings(given, word, **{"head_dim": 0, **usual, "rotated": 0})
    if not found["head_dim"]:
        raise ConversionError(f'{word} needs the size of a head, as in {{"{word}": {{"head_dim": 64}}}}')
    rotated = found["rotated"] or found["head_dim"]
    if rotated > found["head_dim"] or rotated % 2:
        raise ConversionError(f"{word}: rotated must be even and at most head_dim, not {rotated}")
    return DeinterleaveRotary(found["head_dim"], rotated)


def _each(given: Any, place: Place) -> Operation:
    if not isinstance(given, list) or len(given) != len(place.shapes):
        raise ConversionError(f"each needs a list of {len(place.shapes)}, one for each tensor, null for none of them")
    targets = place.targets if len(place.targets) == len(given) else ((),) * len(given)
    each = zip(map(_list_of, given), place.shapes, targets, strict=True)
    return OneByOne(tuple(steps_of(asked, [shape], [target], place.config) for asked, shape, target in each))


def _simple(word: str, op: Callable[[Place], Operation]) -> Callable[[Any, Place], Operation]:
    def made(given: Any, place: Place) -> Operation:
        if given is not None:
            raise ConversionError(f"{word} takes no argument, not {shown(given)}")
        return op(place)

    return made


KNOWN: Mapping[str, Callable[[Any, Place], Operation]] = {
    "transpose": _simple("transpose", lambda place: Transpose()),
    "squeeze": _simple("squeeze", lambda place: Squeeze()),
    "split": _split,
    "join": _join,
    "stack": _simple("stack", lambda place: StackTensors(len(place.shapes))),
    "unstack": _simple("unstack", lambda place: Reversed(StackTensors(len(place.targets)))),
    "pairs-to-halves": lambda given, place: _rotary(given, place, "pairs-to-halves"),
    "halves-to-pairs": lambda given, place: Reversed(_rotary(given, place, "halves-to-pairs")),
    "scale": lambda given, place: Scale(_number(given, "scale")),
    "add": lambda given, place: Add(_number(given, "add")),
    "constant": lambda given, place: Constant(_number(given, "constant"), place.targets),
    "each": _each,
}
"""Word -> what makes the operation of its argument and its place."""
