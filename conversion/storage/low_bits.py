"""Weights in few bits: what every format of them says of itself, and a checkpoint as if its weights were plain.

Each format is one object (`AWQ`, `FP8` and others; `formats.py` lists them) that checkpoints of any family may have:
`convert`, `from_official` and `inspect` ask it, and the family's rules see plain weights, or AWQ's.
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
NOT_READ = tuple(
    f".{part}_{kind}" for part in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point", "global_scale")
)
"""How names of tensors end that say how inputs, outputs, queries, keys and values are rounded."""


class LowBitFormat(ABC):
    """How some checkpoints store their weights.

    Attributes:
        method: what `quant_method` calls it.
        ending: what the names of tensors end in that only this format has.
        stored: the dtypes of stored weights that would pass for plain ones; none where their names show it.
        note, note_on_paper: what a user must know of a conversion to plain weights, and of a config; "" for nothing.
        not_read: what the names of tensors end in that say nothing of the weights.
        may_have_4_bits: whether some families keep such weights (`Names.low_bits`), and `dequantize` makes them plain.
    """

    method = ending = note = note_on_paper = ""
    stored: tuple[torch.dtype, ...] = ()
    not_read: tuple[str, ...] = ()
    may_have_4_bits = False

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
    def groups(self, checkpoint: Checkpoint, dtype: torch.dtype, exact: bool = False) -> list[Group]:
        """What makes plain weights of a checkpoint's tensors.

        Args:
            checkpoint: whose tensors they are.
            dtype: of the plain weights, where the format does not say it.
            exact: whether they are float32 and not rounded, where the format says otherwise.

        Raises:
            ConversionError: some do not fit together.
        """

    def plain_entries(self, official: Mapping[str, Any]) -> dict[str, Any]:
        """The `config.json` of the plain checkpoint."""
        return without(official)

    def kept_entries(self, official: Mapping[str, Any], keeps: bool) -> dict[str, Any] | None:
        """The `config.json` of a checkpoint of AWQ's with the same weights; None where they become plain.

        Args:
            official: its `config.json`.
            keeps: whether its family keeps 4 bits.
        """
        return None

    def kept_groups(self, checkpoint: Checkpoint) -> list[Group]:
        """What makes AWQ's tensors of a checkpoint's."""
        raise NotImplementedError

    def spare(self, checkpoint: Checkpoint) -> set[str]:
        """The names of tensors that a model may do without."""
        return set()

    def notes(self, official: Mapping[str, Any], kept: bool = False) -> list[str]:
        """What a user must know of a conversion, of weights that become plain or are kept."""
        return [self.note] if self.note else []

    def notes_on_paper(self, official: Mapping[str, Any]) -> list[str]:
        """What a user must know of a config whose weights become plain."""
        return [self.note_on_paper] if self.note_on_paper else []

    def to_load(self, official: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entries by which the official class makes plain weights itself; None: `read_plain` makes them."""
        return None

    def check_plain(self, tensors: Mapping[str, HasHeader], names: Iterable[str]) -> None:
        """Refuse tensors that have few bits still, among these that the model would take.

        Raises:
            ConversionError: naming them, and what is missing.
        """
        lacking = [f"{shown(name)}: needs {name}{self.ending}" for name in names if tensors[name].dtype in self.stored]
        if lacking:
            what = f"{self.method.upper()} weights: parts that are missing"
            raise ConversionError(f"{what} ({len(lacking)}):{listed(lacking)}")

    def read_plain(self, checkpoint: Checkpoint, dtype: torch.dtype, exact: bool = False) -> dict[str, Tensor]:
        """All weights of a checkpoint in a dtype, plain; `exact` is explained at `groups`."""
        plain = View(self, checkpoint, self.groups(checkpoint, dtype, exact), {})
        return {name: plain.read(name).to(dtype) for name in plain.tensors}


class View:
    """The names, headers and tensors of a checkpoint as if its weights were plain or AWQ's, whatever its family.

    Args:
        low_bits: the format of its weights. The tensors say which they are.
        checkpoint: whose `config.json` tells of such weights.
        groups: what makes the other weights.
        entries: the `config.json` that tells of those.

    Attributes:
        low_bits, groups, entries: the same.
        spare: the names of tensors that a model may do without.
        tensors: name -> header, of the weights in place of their parts.
    """

    def __init__(self, low_bits: LowBitFormat, checkpoint: Checkpoint, groups: list[Group], entries: dict[str, Any]):
        self.low_bits, self.groups, self.entries = low_bits, groups, entries
        self._read, self.spare = checkpoint.read, low_bits.spare(checkpoint)
        self._makers = {target.name: (group, place) for group in groups for place, target in enumerate(group.targets)}
        makers = {name: group for group in groups for name in group.sources}
        self.tensors: dict[str, HasHeader] = {}
        for name, info in checkpoint.tensors.items():
            if name in makers:
                self.tensors |= {target.name: target for target in makers[name].targets}
            elif not name.endswith(low_bits.not_read):
                self.tensors[name] = info

    def read(self, name: str) -> Tensor:
        """A tensor, as here."""
        if name not in self._makers:
            return self._read(name)
        group, place = self._makers[name]
        return group.made(self._read)[place]


def view_of(low_bits: LowBitFormat, checkpoint: Checkpoint, dtype: torch.dtype, kept: dict[str, Any] | None) -> View:
    """A checkpoint as if its weights were plain or, with the entries `kept` (`kept_entries`), AWQ's.

    Raises:
        ConversionError: parts of weights do not fit together.
    """
    if kept is not None:
        return View(low_bits, checkpoint, low_bits.kept_groups(checkpoint), kept)
    groups = low_bits.groups(checkpoint, dtype)
    return View(low_bits, checkpoint, groups, low_bits.plain_entries(checkpoint.config))


def refuse(lines: list[str], what: str = "") -> None:
    """Refuse settings of weights, if a line says why.

    Raises:
        ConversionError: with the lines, about `what` weights.
    """
    if lines:
        said = f"config.json: {FIELD}: {what}weights of this kind cannot be converted:{listed(lines)}"
        raise ConversionError(f"{said}\nConvert the plain weights that they were made of.")


def also_rounded(inputs: bool, cache: bool) -> list[str]:
    """A note on what else a checkpoint's settings say is rounded: inputs of linear layers, cached keys and values."""
    what = ["inputs of linear layers"] * inputs + ["cached keys and values"] * cache
    said = f"the checkpoint is for programs that also round {' and '.join(what)}; here they stay as they are"
    return [said] if what else []


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
