"""Entries of a `config.json` that neither layout's class knows and that other libraries read, such as a reranker's."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from blockformer.declared_fields import other_entries
from blockformer.files.errors import shown
from blockformer.files.named_code import names_code
from blockformer.model.axes import axes
from blockformer.model_classes import CONFIGS

from .families.further import FIELD as FURTHER
from .families.registry import Family


def carry_others(family: Family, official: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Set the entries of an official `config.json` that its class does not know in a Blockformer config, as they are.

    Left out are entries that mean something in a Blockformer config of any topology, entries that name code, and the
    number of layers that predict further tokens, which is ours where the checkpoint holds them whole.
    """
    if family.is_file:
        return
    ours = {name for each in CONFIGS.values() for name in axes(each)}
    for name in family.settings.unused(official):
        is_known = name in ours or name in family.settings.defaults.to_dict() or hasattr(config, name)
        if is_known or name == FURTHER or name.startswith("_") or names_code({name: official[name]}):
            continue
        setattr(config, name, copy.deepcopy(official[name]))
        if config.get_text_config() is not config:
            delattr(config, name)  # transformers would take it for the model's settings


def others_for(family: Family, config: PretrainedConfig) -> dict[str, Any]:
    """The entries of a Blockformer config for other libraries, without any that an official class would follow."""
    others = other_entries(config)
    return {name: others[name] for name in family.settings.unused(others)}


def note_on_unused(family: Family, official: Mapping[str, Any], config: PretrainedConfig) -> list[str]:
    """The family's note on entries that change nothing, and which of them a Blockformer config has; or no note."""
    carried = [name for name in family.settings.unused(official) if name in other_entries(config)]
    are_all = len(carried) == len(family.settings.unused(official))
    which = "" if are_all else f"{', '.join(map(shown, carried))}: "
    end = f" ({which}kept in config.json, for other libraries)" if carried else ""
    return [note + end for note in family.settings.unused_note(official)]
