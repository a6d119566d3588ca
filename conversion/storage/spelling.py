"""How the names in a checkpoint differ from those of today's official class. Each spelling knows its way back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.telling_tensors import computed_weights


class Spelling(Protocol):
    """A change of names that can be undone."""

    def to_class(self, name: str) -> str:
        """Today's official name of what a checkpoint calls `name`."""

    def to_file(self, name: str) -> str:
        """The way back."""


class Spellings(tuple[Spelling, ...]):
    """Spellings one after the other, the last one nearest to the class: how names in a checkpoint differ from it."""

    def to_class(self, name: str) -> str:
        for each in self:
            name = each.to_class(name)
        return name

    def to_file(self, name: str) -> str:
        for each in reversed(self):
            name = each.to_file(name)
        return name


@dataclass(frozen=True)
class Prefix:
    """Names that begin with another prefix.

    Args:
        in_file: the prefix in a checkpoint; "" for none.
        in_class: the prefix in the class; "" for none.
        inner: what the names of these tensors begin with after their prefix.
    """

    in_file: str
    in_class: str
    inner: tuple[str, ...]

    def to_class(self, name: str) -> str:
        return self._changed(name, self.in_file, self.in_class)

    def to_file(self, name: str) -> str:
        return self._changed(name, self.in_class, self.in_file)

    def _changed(self, name: str, old: str, new: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old or self.inner) else name


@dataclass(frozen=True)
class OneName:
    """One tensor that a checkpoint has under another name of the class: of tied ones, a file holds either.

    Args:
        in_file: the name in a checkpoint.
        in_class: the name in the class.
    """

    in_file: str
    in_class: str

    def to_class(self, name: str) -> str:
        return self.in_class if name == self.in_file else name

    def to_file(self, name: str) -> str:
        return self.in_file if name == self.in_class else name


@dataclass(frozen=True)
class Ending:
    """Names that end otherwise.

    Args:
        in_class: ending in a checkpoint -> ending in the class.
    """

    in_class: Mapping[str, str]

    def to_class(self, name: str) -> str:
        return _with_ending(name, self.in_class)

    def to_file(self, name: str) -> str:
        return _with_ending(name, {new: old for old, new in self.in_class.items()})


@dataclass(frozen=True)
class Parts:
    """Names that contain other parts.

    Args:
        in_class: part in a checkpoint -> part in the class, one after the other.
    """

    in_class: Mapping[str, str]

    def to_class(self, name: str) -> str:
        for old, new in self.in_class.items():
            name = name.replace(old, new)
        return name

    def to_file(self, name: str) -> str:
        for old, new in reversed([*self.in_class.items()]):
            name = name.replace(new, old)
        return name


def _with_ending(name: str, endings: Mapping[str, str]) -> str:
    return next((name.removesuffix(old) + new for old, new in endings.items() if name.endswith(old)), name)


@dataclass(frozen=True)
class Alternative:
    """Another way in which some checkpoints write names, which their tensors show.

    Attributes:
        name: what the record of a conversion calls it.
        spelling: how such names differ from the class's; the rules of storage may ask for the name instead.
        starts, ends: some name begins with one of these and ends in one of those; empty for any.
        usual: what names begin with where they are the class's; fewer may. "" for what cannot be told.
    """

    name: str
    spelling: Spelling = Spellings()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    usual: str = ""

    def is_shown(self, names: Iterable[str]) -> bool:
        """Whether tensors of these names, as the checkpoint has them, are written so."""
        known = list(names)
        count = sum(name.startswith(self.starts or "") and name.endswith(self.ends or "") for name in known)
        return count > sum(name.startswith(self.usual) for name in known if self.usual)


def names_in_class(names: Iterable[str], spellings: Spellings) -> dict[str, str]:
    """Name in today's official class -> name in the checkpoint.

    Raises:
        ConversionError: the checkpoint names its tensors in more than one way, or holds adapters inside its weights.
    """
    names = list(names)
    if computed := computed_weights(names):
        raise ConversionError("; ".join(computed))
    found: dict[str, str] = {}
    mixed = []
    for name in names:
        in_class = spellings.to_class(name)
        if in_class in found:
            mixed.append(f"{shown(name)} and {shown(found[in_class])} are the same tensor")
        elif (usual := spellings.to_file(in_class)) != name:
            mixed.append(f"{shown(name)}: the others are spelled like {shown(usual)}")
        found.setdefault(in_class, name)
    if mixed:
        raise ConversionError(f"the checkpoint mixes two ways to name tensors; rename these:{listed(mixed)}")
    return found
