"""Numbers and switches: the inner width, factors, flags."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blockformer.files.errors import ConversionError
from blockformer.model.axes import is_number

from .base import Official, Value


class InnerSize(Value):
    """The inner width of the feed-forward network, where None, or nothing at all, is four times the width.

    Args:
        name: the official field, if there is one.
    """

    def __init__(self, name: str | None = None):
        self.name = name

    def read(self, official):
        said = None if self.name is None else getattr(official.config, self.name)
        return {"intermediate_size": 4 * official.config.hidden_size if said is None else said}

    def write(self, config, head):
        plain = config.intermediate_size == 4 * config.hidden_size
        return {} if self.name is None else {self.name: None if plain else config.intermediate_size}


def roundest(exact: float, fits: Callable[[float], bool]) -> float:
    """The roundest number near `exact` that fits: what a config most likely said; `exact` if none does."""
    rounded = (round(exact, digits) for digits in range(17))
    near = (*rounded, exact, math.nextafter(exact, math.inf), math.nextafter(exact, 0))
    found = next((each for each in near if each > 0 and fits(each)), exact)
    return int(found) if found == int(found) else found


def positive(official: Official, name: str) -> float:
    """The value of an official setting that must be a positive number.

    Raises:
        ConversionError: it is not.
    """
    value = getattr(official.config, name)
    if not is_number(value) or value <= 0:
        raise ConversionError(f"config.json: {name} is {value!r}; it must be a positive number")
    return value


def invert_power(factor: float, power: float) -> float:
    """The roundest number whose `power` is a factor."""
    return roundest(factor ** (1 / power), lambda each: each**power == factor)


@dataclass(frozen=True)
class Factor(Value):
    """A factor that is a number there, and None here where it is 1."""

    theirs: str
    ours: str

    def read(self, official):
        factor = getattr(official.config, self.theirs)
        return {self.ours: None if factor == 1 else float(factor)}

    def write(self, config, head):
        factor = getattr(config, self.ours)
        return {self.theirs: 1.0 if factor is None else factor}


@dataclass(frozen=True)
class RootOfWidth(Value):
    """The factor of the embeddings, which is the root of the width.

    Args:
        flag: the official setting that says whether there is one; "" where there always is.
    """

    flag: str = ""

    def read(self, official):
        is_there = not self.flag or getattr(official.config, self.flag)
        return {"embedding_scale": official.config.hidden_size**0.5 if is_there else None}

    def write(self, config, head):
        return {self.flag: config.embedding_scale is not None} if self.flag else {}


@dataclass(frozen=True)
class Flag(Value):
    """A Blockformer field whose value an official flag chooses.

    Args:
        theirs: the flag.
        ours: our field.
        values: our value where the flag is false, and where it is true.
    """

    theirs: str
    ours: str
    values: tuple[Any, Any]

    def read(self, official):
        return {self.ours: self.values[bool(getattr(official.config, self.theirs))]}

    def write(self, config, head):
        return {self.theirs: getattr(config, self.ours) == self.values[1]}
