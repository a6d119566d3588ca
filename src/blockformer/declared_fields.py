"""The fields that a config has, those of its blocks from outside included."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .model.axes import BLOCKS, Axis, axes, blocks_of


def _are_ours(is_ours: bool) -> list:
    folder = Path(axes.__code__.co_filename).parent
    blocks = (block for known in [*BLOCKS.values()] for block in [*known.values()])
    return [block for block in blocks if (block.path.parent == folder) is is_ours]


def from_outside() -> list:
    """The registered blocks whose files are not this package's."""
    return _are_ours(False)


def of_the_package() -> list:
    """Blocks whose files are the package's: parts of the model that only some repos carry."""
    return _are_ours(True)


def own_fields(settings: Mapping[str, Any]) -> dict[str, Axis]:
    """The fields of the blocks that some settings name, of which some may be functions of all."""
    values = {axis: settings.get(axis) for axis in BLOCKS}
    named = SimpleNamespace(**{axis: value(settings) if callable(value) else value for axis, value in values.items()})
    return {name: each for block in blocks_of(named) for name, each in block.fields.items()}


def axes_of(config) -> dict[str, Axis]:
    """Every declared field of a config, by name: those of its class and those of its blocks."""
    return axes(type(config)) | own_fields(vars(config))


def other_entries(config) -> dict[str, Any]:
    """The entries of a config that are not its fields and that other libraries read, by name."""
    entries = config.to_dict()
    return {name: entries[name] for name in entries["other_entries"] or ()}
