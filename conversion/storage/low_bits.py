"""Weights in few bits: what every format of them says of itself, and a checkpoint as if its weights were plain.

Each format is one object (`AWQ`, `FP8` and others; `formats.py` lists them) that checkpoints of any family may have:
`convert`, `from_official` and `inspect` ask it, and the family's rules see plain weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.safetensors_io import HasHeader

from ..rules.groups import Group

FIELD = "quantization_config"
"""The official entry that tells of such weights."""


class LowBitFormat(ABC):
    """How some checkpoints store their weights.

    Attributes:
        method: what `quant_method` calls it.
        ending: what the names of tensors end in that only this format has.
        stored: the dtype of a stored weight that would pass for a plain one; None where its name shows it.
        note, note_on_paper: what a user must know of a conversion, and of a config; "" for nothing.
        may_stay: whether some families keep the bits (`Names.low_bits`).
    """

    method = ending = note = note_on_paper = ""
    stored: torch.dtype | None = None
    may_stay = False

    def is_told(self, official: Mapping[str, Any]) -> bool:
        """Whether an official `config.json` tells of such weights."""
        entries = official.get(FIELD)
        return isinstance(entries, Mapping) and lower(entries.get("quant_method")) == self.method

    def is_there(self, official: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether a checkpoint with this config and tensors of these names has such weights."""
        return any(name.endswith(self.ending) for name in names)

    @abstractmethod
    def check(self, official: Mapping[str, Any]) -> None:
        """Refuse an official `config.json` that does not tell of such weights, or of another kind of them.

        Raises:
            ConversionError: naming the entries.
        """

    @abstractmethod
    def groups(self, tensors: Mapping[str, HasHeader], dtype: torch.dtype) -> list[Group]:
        """What makes plain weights of a checkpoint's tensors.

        Args:
            tensors: all of them.
            dtype: of the plain weights, where the format does not say it.

        Raises:
            ConversionError: some do not fit together.
        """

    def plain_entries(self, official: Mapping[str, Any]) -> dict[str, Any]:
        """The `config.json` of the plain checkpoint."""
        return without(official)

    def to_load(self, official: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entries by which the official class makes plain weights itself; None: `read_plain` makes them."""
        return None

    def check_plain(self, tensors: Mapping[str, HasHeader], names: Iterable[str]) -> None:
        """Refuse tensors that have few bits still, among these that the model would take.

        Raises:
            ConversionError: naming them, and what is missing.
        """
        lacking = [f"{shown(name)}: needs {name}{self.ending}" for name in names if tensors[name].dtype is self.stored]
        if lacking:
            what = f"{self.method.upper()} weights: parts that are missing"
            raise ConversionError(f"{what} ({len(lacking)}):{listed(lacking)}")

    def read_plain(self, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
        """All weights of a checkpoint in a dtype, plain."""
        plain = PlainView(self, checkpoint, dtype)
        return {name: plain.read(name).to(dtype) for name in plain.tensors}


class PlainView:
    """The names, headers and tensors of a checkpoint as if its weights were plain, whatever its family.

    Args:
        low_bits: the format of its weights. The tensors say which they are.
        checkpoint: whose `config.json` tells of such weights.
        dtype: of the plain weights, where the format does not say it.

    Attributes:
        low_bits: the format.
        groups: what makes the plain weights.
        tensors: name -> header, of the plain weights in place of their parts.
        entries: the `config.json` of the plain checkpoint.

    Raises:
        ConversionError: parts of weights do not fit together.
    """

    def __init__(self, low_bits: LowBitFormat, checkpoint: Checkpoint, dtype: torch.dtype):
        self.low_bits, self.groups = low_bits, low_bits.groups(checkpoint.tensors, dtype)
        self.entries = low_bits.plain_entries(checkpoint.config)
        self._read = checkpoint.read
        self._makers = {group.targets[0].name: group for group in self.groups}
        makers = {name: group for group in self.groups for name in group.sources}
        self.tensors: dict[str, HasHeader] = {}
        for name, info in checkpoint.tensors.items():
            target = makers[name].targets[0] if name in makers else None
            if target is None:
                self.tensors[name] = info
            else:
                self.tensors.setdefault(target.name, target)

    def read(self, name: str) -> Tensor:
        """A tensor, plain."""
        return self._makers[name].made(self._read)[0] if name in self._makers else self._read(name)


def without(official: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a checkpoint's plain twin."""
    return {name: value for name, value in official.items() if name != FIELD}


def lower(value: Any) -> Any:
    """A text in lower case, and anything else as it is."""
    return value.lower() if isinstance(value, str) else value


def wrong_entries(
    entries: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]], free: Collection[str]
) -> list[str]:
    """A line for each entry of `quantization_config` that means something else than weights of this kind.

    Args:
        entries: as they are compared and told.
        wanted: entry -> the values that it may have.
        free: entries that may have any value.
    """
    wrong = [
        f"{name} is {told(entries.get(name))}, not {' or '.join(map(repr, values))}"
        for name, values in wanted.items()
        if entries.get(name) not in values
    ]
    return wrong + [f"{shown(name)} is not understood" for name in entries if name not in (*wanted, *free)]


def told(value: Any) -> str:
    """A value of an entry, for a message."""
    return repr(value) if value is None or isinstance(value, bool | int | float) else shown(value)
