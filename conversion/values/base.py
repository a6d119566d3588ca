"""What a value of a config is: our fields that need more than a renaming, read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError

from ..storage.variant import CheckpointVariant


@dataclass(frozen=True)
class Official:
    """What a value is read from.

    Attributes:
        config: the official configuration object, complete with its defaults.
        entries: `config.json` as it is stored.
        variant: how the checkpoint is written.
        head: its head.
    """

    config: PretrainedConfig
    entries: Mapping[str, Any]
    variant: CheckpointVariant
    head: Any


class Value(Protocol):
    """Fields of ours that do not simply have another name in an official config, in both directions."""

    def read(self, official: Official) -> dict[str, Any]:
        """Our fields. Raises `ConversionError` where ours cannot express it."""

    def write(self, config: PretrainedConfig, head: Any) -> dict[str, Any]:
        """The official entries. Raises `NotExpressible` where they cannot say it."""


class NotExpressible(ConversionError):
    """A Blockformer field whose value a family cannot write.

    Args:
        name: the field.
        wanted: what it must be.
        value: what it is.
    """

    def __init__(self, name: str, wanted: str, value: Any = None):
        super().__init__(f"{name} must be {wanted}, not {value!r}")
        self.field = name


@dataclass(frozen=True)
class Computed(Value):
    """A value of two functions."""

    reader: Callable[[Official], dict[str, Any]] = lambda official: {}
    writer: Callable[[PretrainedConfig, Any], dict[str, Any]] = lambda config, head: {}

    def read(self, official: Official) -> dict[str, Any]:
        return self.reader(official)

    def write(self, config: PretrainedConfig, head: Any) -> dict[str, Any]:
        return self.writer(config, head)


def constants(**entries: Any) -> Computed:
    """Official entries that are written and never read."""
    return Computed(writer=lambda config, head: entries)
