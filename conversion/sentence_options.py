"""Settings of `sentence-transformers` that name parts or options of the official model, as our repos have them."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, shown
from blockformer.files.json_files import read_json
from blockformer.files.names import BODIES, MODULES, SETTINGS
from blockformer.files.sentence_settings import FLOAT32

from .plan import Plan

OPTIONS = ("config_args", "config_kwargs")
"""Entries of the model's settings with options for its config, by their earlier and their present name."""
BODY = "0.model."
"""What the names of the model's own modules begin with there."""


def translated(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """File -> content, of the settings that mean something else in a Blockformer repo.

    Args:
        plan: of a conversion into our layout.
        checkpoint: its source.

    Raises:
        ConversionError: an option asks for what ours cannot express, or a module is not one of the model.
    """
    changed = {}
    for name in (*BODIES, SETTINGS) if os.path.lexists(checkpoint.path(MODULES)) else ():
        if not os.path.lexists(checkpoint.path(name)):
            continue
        content = read_json(checkpoint.member(name))
        ours = _renamed_modules(content, plan) if name == SETTINGS else _options(name, content, plan, checkpoint)
        if content != {**content, **ours}:
            changed[name] = {**content, **ours}
    return changed


def _options(name: str, content: Mapping[str, Any], plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """The options for a config, as our fields: transformers says nothing of an option that a config does not have."""
    key = next((each for each in OPTIONS if each in content), "")
    given = content.get(key)
    if not given or not isinstance(given, dict):
        return {}
    family, entries = plan.family, {**checkpoint.config}
    entries.pop("quantization_config", None)
    try:
        official = family.settings.official_config(entries)
        followed = {option: value for option, value in given.items() if hasattr(official, option)}
        asked = family.settings.official_config({**entries, **followed})
        before, after = (
            family.settings.our_config(family.config_from(each, plan.variant)).to_dict()
            for each in (entries, {**entries, **followed})
        )
    except ConversionError as error:
        raise ConversionError(f"{name}: {key}: {error}") from error
    for option, value in followed.items():  # as transformers does it, after the config is made
        setattr(official, option, value)
    if official.to_dict() != asked.to_dict():
        fix = "write them into config.json if the model was trained so, else remove them"
        names = ", ".join(map(shown, followed))
        raise ConversionError(f"{name}: {key}: other settings follow from {names}, and not if they stand here; {fix}")
    stay = {
        option: value
        for option, value in given.items()
        if after.get(option) == value or not (option in followed or hasattr(plan.target_config, option))
    }
    return {key: stay | {field: value for field, value in after.items() if value != before.get(field)}}


def _renamed_modules(content: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The entry that lists modules, with the names that ours have."""
    named = content.get(FLOAT32)
    if not named or not isinstance(named, list):
        return {}
    return {FLOAT32: [ours for each in named for ours in _names(each, plan)]}


def _names(module: Any, plan: Plan) -> Iterator[str]:
    if not str(module).startswith(BODY):
        yield module
        return
    weight = f"{module.removeprefix(BODY)}.weight"
    groups = [group for group in plan.groups if weight in map(plan.to_class, group.sources)]
    if not groups:
        raise ConversionError(f"{SETTINGS}: {FLOAT32} names {shown(module)}, which is not a module of this model")
    for target in groups[0].targets:
        yield BODY + target.name.removesuffix(".weight")
