"""One declaration a field of the config: its default, the values it takes, its group and its meaning.

The config's checks and its docstring, `blockformer inspect` and the tests of the docs read it from there. A part of the
model (a norm, attention) declares its fields next to its module.
"""

import dataclasses
import difflib
import sys
import typing
from collections.abc import Callable
from typing import Any


def is_integer(value) -> bool:
    """Whether a value is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value) -> bool:
    """Whether a value is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


# The kinds of values, by what an error calls them. A part's `check` looks at kinds that take anything.
KINDS: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool),
    "a positive integer": lambda value: is_integer(value) and 0 < value < 2**63,
    "a positive integer, or -1": lambda value: is_integer(value) and (value == -1 or value > 0),
    "an integer of 0 or more": lambda value: is_integer(value) and value >= 0,
    "an integer above 1": lambda value: is_integer(value) and 1 < value < 2**63,
    "a number of 0 or more": lambda value: is_number(value) and value >= 0,
    "a positive number": lambda value: is_number(value) and value > 0,
    "a probability from 0 to 1": lambda value: is_number(value) and 0 <= value <= 1,
    "4, or None for plain weights": lambda value: is_integer(value) and value == 4,
    "a token": lambda value: True,
    "a list": lambda value: True,
    "a dict": lambda value: isinstance(value, dict),
    "a dict, layer type -> a dict": lambda value: isinstance(value, dict) and {*map(type, value.values())} <= {dict},
    "a list of names": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "a dict, layer -> list of heads": lambda value: (
        isinstance(value, dict)
        and all(str(layer).isdecimal() and isinstance(heads, list) for layer, heads in value.items())
    ),
}
FLAG = (True, False)  # of a field that is a flag or a name: (*FLAG, "fixed")
# The headings of `blockformer inspect`, in its order.
GROUPS = tuple("size embeddings norm positions attention feed-forward weights head training tokens use".split())
SHARED = "replicated_with_grad_allreduce"  # in a tensor-parallel plan: whole in each process, gradients added
# Axis -> value -> a block, which `blocks.py` enters, most of them from outside. A repo without any lacks that file.
BLOCKS: dict = {axis: {} for axis in "attention_type layer_types mlp_type norm_type position_type residual".split()}
_DECLARED: dict[type, dict] = {}  # what `axes` has found of a config class


class Axis(typing.NamedTuple):
    """What is declared of a field.

    Attributes:
        default: the value when none is given.
        values: one of `KINDS`, or a tuple of names of which the field takes one, with `FLAG` in it also true and false.
        group: one of `GROUPS`.
        meaning: what it does, in half a sentence.
        optional: whether it may be None, as its annotation says.
    """

    default: Any
    values: str | tuple
    group: str
    meaning: str
    optional: bool = False

    def check(self, name: str, value) -> None:
        """Refuse a value that the field `name` does not take."""
        if value is None and self.optional:
            return
        if isinstance(self.values, tuple):
            check_choice(name, value, (*self.values, *BLOCKS.get(name, ())))
        elif not KINDS[self.values](value):
            raise ValueError(f"{name} must be {self.values}, not {value!r}.")

    def describe(self) -> str:
        """Values, default and meaning in words, as a docstring has them."""
        values = self.values if isinstance(self.values, str) else ", ".join(spelt(self.values))
        values = values if 0 < len(values) < 150 else "a name"  # of dozens of activations, or of blocks
        return f"({values}; default {self.default!r}): {self.meaning}."


def axis(default, values, group: str, meaning: str) -> Any:
    """Declare a field in the body of a dataclass; the arguments are the same as of `Axis`."""
    if isinstance(values, str) and values not in KINDS:
        raise KeyError(f"{values!r} is not one of axes.KINDS: use one of them, or a tuple of the names that it takes.")
    return dataclasses.field(default=default, metadata={"axis": Axis(default, values, group, meaning)})


def flag(default, group: str, meaning: str) -> Any:
    """Declare a field that is true or false."""
    return axis(default, "true or false", group, meaning)


def axes(config_class) -> dict[str, Axis]:
    """Every declared field of a config class, inherited ones included, by its name, group by group."""
    if config_class not in _DECLARED:
        # After `from __future__ import annotations` a type is a string.
        declared = {
            field.name: field.metadata["axis"]._replace(optional="None" in str(field.type))
            for field in dataclasses.fields(config_class)
            if "axis" in field.metadata
        }
        _DECLARED[config_class] = dict(sorted(declared.items(), key=lambda item: GROUPS.index(item[1].group)))
    return _DECLARED[config_class]


def blocks_of(config) -> list:
    """The blocks from outside that a config names, one for an axis."""
    named = ((known, getattr(config, axis)) for axis, known in [*BLOCKS.items()])  # another thread may register
    each = ((known, one) for known, value in named for one in (value if isinstance(value, list) else [value]))
    return [*dict.fromkeys(known[one] for known, one in each if isinstance(one, str) and one in known)]


class Part:
    """Fields that belong together: a dataclass next to the module that reads them, and one more base of a config class.

    Each part speaks for itself, in the order of `parts_of`, and calls no `super`. It may have `fill_defaults()` for
    fields that are None and follow from others, `check()` for fields that contradict each other, and `share_out(plan,
    has_cross_attention)` to say in a plan for a stack, by name, how processes share its modules.
    """

    if typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The fields of the other parts."""


def parts_of(config_class, method: str) -> list:
    """The classes that have their own method: a config's last base first, the config class itself last.

    Asked by name: the loader of remote code may run this file again, and `Part` is then another class.
    """
    return [part for part in reversed(config_class.__mro__) if method in vars(part)]


def spelt(choices) -> list[str]:
    """Names of choices as JSON spells them: true and false in small letters."""
    return [str(each).lower() if isinstance(each, bool) else each for each in choices]


def check_choice(name: str, value, choices) -> None:
    """Refuse a value that is none of the names; where true and false are among them, 1 and 0 are not."""
    if not isinstance(value, str | bool) or value not in choices:
        names = spelt(choices)
        listed = ", ".join(names) or "the blocks that are registered (there are none)"
        raise ValueError(f"{name} must be one of {listed}, not {value!r}.{did_you_mean(str(value), names)}")


def did_you_mean(name: str, known, cutoff: float = 0.6) -> str:
    """A hint at the nearest of the known names, or nothing."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""
