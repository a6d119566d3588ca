"""Checkpoints that convert under the names that they have, also next to tensors that the model has no place for."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from blockformer.conversion.model_tensors import with_sources
from blockformer.conversion.plan import plan_in
from blockformer.conversion.rules.groups import copy_of
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError
from blockformer.files.quiet import quiet
from blockformer.files.safetensors_io import TensorInfo

from .any_checkpoint import AnyCheckpoint, Changed
from .layouts import Layouts, all_names, layouts_of
from .prefixes import LORA

TRIED = 100
"""The most tensors that are tried one by one."""


def layouts_as_it_is(
    checkpoint: AnyCheckpoint, entries: Mapping[str, Any], names: Mapping[str, str], family: str | None
) -> Layouts | None:
    """The layouts of a checkpoint that converts under the names that it has (many files lack a prefix), or None.

    Args:
        checkpoint: of which tensors are read.
        entries: its `config.json`.
        names: name -> name in the file. Those that no model of the family has may be in the way, except adapters, which
            are merged.
        family: None takes the family that `model_type` says.
    """

    def fits(some: Iterable[str]) -> bool:
        groups = [copy_of(name, checkpoint.tensors[names[name]]) for name in some]
        return _converts(Changed(checkpoint, with_sources(groups, names), entries), family)

    try:
        with quiet(errors=True):
            layouts = layouts_of(entries, family, names, lambda name: checkpoint.read(names[name]))
    except ConversionError:
        return None
    if fits(names):
        return layouts
    known = layouts.known | all_names(entries, family)
    rest = [name for name in names if name in known]
    has_adapters = any(part in LORA for name in names for part in name.split("."))
    return None if has_adapters or len(rest) == len(names) or not fits(rest) else layouts


def foreign(written: Changed, unknown: Mapping[str, TensorInfo], family: str | None) -> Mapping[str, TensorInfo]:
    """The tensors, out of some, that keep the others from converting; files may have the rest, such as masks.

    Args:
        written: the checkpoint, with all of them.
        unknown: the ones.
        family: None takes the family that `model_type` says.
    """

    def fits(but: Collection[str]) -> bool:
        groups = [group for name, group in written.groups.items() if name not in but]
        return _converts(Changed(written.source, groups, written.config), family)

    if not unknown or len(unknown) > TRIED or not fits(unknown):
        return unknown
    return {name: info for name, info in unknown.items() if not fits(unknown.keys() - {name})}


def _converts(checkpoint: Checkpoint, family: str | None) -> bool:
    try:
        with quiet(errors=True):
            plan_in(checkpoint, family, None)
    except ConversionError:
        return False
    return True
