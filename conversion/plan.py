"""What a conversion will do, worked out from the config and the headers alone: either way, or within our layout."""

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .checkpoint import Checkpoint, read_json
from .errors import ConversionError, shown
from .families import FAMILIES, Family, family_by_name, family_for, family_of
from .family import NEVER_FOLLOWED
from .mapping import Group, Rule, RuleTable

MEMORY = "conversion.json"
"""A small file in a converted repo: the family and the official config, for an exact way back. Not needed for one."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OURS = "blockformer_"


@dataclass
class Plan:
    """A conversion as it will be done, known from config and headers alone.

    Attributes:
        family: the official family.
        source_config, target_config: configuration objects of both layouts.
        source_class, target_class: model classes of both layouts.
        config_json: the target's `config.json`.
        groups: what to read and write.
        tied: pairs of stored target tensors that must be equal.
        parameters: how many the model has.
    """

    family: Family
    source_config: PretrainedConfig
    source_class: type[PreTrainedModel]
    target_config: PretrainedConfig
    target_class: type[PreTrainedModel]
    config_json: str
    groups: list[Group]
    tied: list[tuple[str, str]]
    parameters: int

    @property
    def sizes(self) -> dict[torch.dtype, int]:
        """Bytes by dtype, the largest share first."""
        sizes: dict[torch.dtype, int] = {}
        for group in self.groups:
            for target in group.targets:
                nbytes = torch.Size(target.shape).numel() * target.dtype.itemsize
                sizes[target.dtype] = sizes.get(target.dtype, 0) + nbytes
        return dict(sorted(sizes.items(), key=lambda entry: -entry[1]))


def plan_in(checkpoint: Checkpoint, family_name: str | None, cast: torch.dtype | None) -> Plan:
    """Official -> ours."""
    official = checkpoint.config
    if is_ours(official):
        raise ConversionError(
            f"{checkpoint.folder}: is in Blockformer's layout already; load it with AutoModel, or convert it with "
            "--to official"
        )
    family = family_of(official) if family_name is None else family_by_name(family_name)
    config = family.our_config(family.config_from(official))
    if cast is not None:
        config.dtype = cast
    shapes, tied, parameters = expected_tensors(family.model_class, config)
    groups = family.rules.plan(checkpoint.tensors, shapes, optional=tied, dtype=cast)
    return Plan(
        family=family,
        source_config=family.official_config(official),
        source_class=family.official_model_class,
        target_config=config,
        target_class=family.model_class,
        config_json=config.to_json_string(),
        groups=groups,
        tied=stored_pairs(tied, groups),
        parameters=parameters,
    )


def plan_out(checkpoint: Checkpoint, family_name: str | None, cast: torch.dtype | None) -> Plan:
    """Ours -> official."""
    if not is_ours(checkpoint.config):
        raise ConversionError(f"{checkpoint.folder}: is not in Blockformer's layout; leave out --to official")
    config = our_config(checkpoint.config)
    memory = remembered(checkpoint.folder)
    if family_name is not None:
        family = family_by_name(family_name)
    elif memory is not None and not memory[0].differences(config):
        family = memory[0]
    else:
        family = family_for(config)
    if config.architectures not in (None, [], [family.our_model_class_name]):
        raise ConversionError(
            f"{checkpoint.folder}: config.json: architectures is {shown(config.architectures)}; only "
            f"{family.our_model_class_name} has an official layout"
        )
    official = _official_settings(family, config, memory)
    _set_dtype(official, cast or config.dtype)
    official_config = family.official_config(official)
    shapes, tied, parameters = expected_tensors(family.official_model_class, official_config)
    groups = family.rules.plan(checkpoint.tensors, shapes, reverse=True, optional=tied, dtype=cast)
    return Plan(
        family=family,
        source_config=config,
        source_class=family.model_class,
        target_config=official_config,
        target_class=family.official_model_class,
        config_json=json_text(official),
        groups=groups,
        tied=stored_pairs(tied, groups),
        parameters=parameters,
    )


def our_config(entries: Mapping[str, Any]) -> PretrainedConfig:
    """Our configuration object of a `config.json` in our layout.

    Raises:
        ConversionError: it is none, or its settings are refused.
    """
    import blockformer
    from blockformer.configuration_blockformer import BlockformerConfig

    model_type = entries.get("model_type")
    public = [value for value in vars(blockformer).values() if isinstance(value, type)]
    classes = [value for value in public if issubclass(value, BlockformerConfig) and value.model_type]
    found = next((config_class for config_class in classes if config_class.model_type == model_type), None)
    if found is None:
        raise ConversionError(f"config.json: model_type {shown(model_type)} is not one of ours")
    kept = {name: value for name, value in entries.items() if name not in NEVER_FOLLOWED}
    try:
        return found(**copy.deepcopy(kept))
    except (ValueError, TypeError) as error:
        raise ConversionError(f"config.json: {error}") from error


def is_ours(entries: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is in our layout."""
    return str(entries.get("model_type", "")).startswith(OURS)


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype that weights can be cast to.

    Raises:
        ConversionError: another one.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConversionError(f"dtype must be one of {', '.join(DTYPES)}, not {shown(name)}")
    return DTYPES[name]


def remembered(folder: Path) -> tuple[Family, dict[str, Any]] | None:
    """The family and official config that a conversion left in a repo, if it did."""
    path = folder / MEMORY
    if not os.path.lexists(path):
        return None
    entries = read_json(path)
    name, official = entries.get("family"), entries.get("config")
    if not isinstance(name, str) or name not in FAMILIES or not isinstance(official, dict):
        raise ConversionError(f"{path}: damaged; delete it, it is not needed")
    return FAMILIES[name], official


def _official_settings(
    family: Family, config: PretrainedConfig, memory: tuple[Family, dict[str, Any]] | None
) -> dict[str, Any]:
    """The official config: the one the model came with if that still says the same, else a new one.

    Entries of the old one that the official class does not know are kept in any case.
    """
    fresh = family.config_to(config)
    if memory is None or memory[0] is not family:
        return fresh
    old = {name: value for name, value in memory[1].items() if name not in NEVER_FOLLOWED}
    try:
        before = family.our_config(family.config_from(old))
    except ConversionError:
        return fresh
    if _meaning(before) == _meaning(config):
        return copy.deepcopy(old)
    return {**{name: old[name] for name in family.unused(old)}, **fresh}


def _meaning(config: PretrainedConfig) -> dict[str, Any]:
    """A config's fields without those that do not say what the model is."""
    hidden = {"architectures", "auto_map", "dtype", "transformers_version", "_name_or_path"}
    return {name: value for name, value in config.to_dict().items() if name not in hidden}


def _set_dtype(official: dict[str, Any], dtype: Any) -> None:
    """Write a dtype under the name that the config uses for it."""
    if dtype is not None:
        name = "torch_dtype" if "torch_dtype" in official and "dtype" not in official else "dtype"
        official[name] = str(dtype).removeprefix("torch.")


def expected_tensors(
    model_class: type[PreTrainedModel], config: PretrainedConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str], int]:
    """Of a model that is not built: name -> shape of its tensors, tied name -> its source, number of parameters."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = model_class(config)
    tied = dict(model.all_tied_weights_keys)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, tied, model.num_parameters()


def stored_pairs(tied: Mapping[str, str], groups: list[Group]) -> list[tuple[str, str]]:
    """Tied names that are both written."""
    written = {target.name for group in groups for target in group.targets}
    return [(name, source) for name, source in tied.items() if name in written and source in written]


def identity_rules(names: Iterable[str]) -> RuleTable:
    """Identity rules for our own tensor names."""
    patterns = {".".join("{layer}" if part.isdigit() else part for part in name.split(".")) for name in names}
    return RuleTable([Rule(pattern, pattern) for pattern in sorted(patterns)])


def json_text(entries: Mapping[str, Any]) -> str:
    """Entries as the text of a JSON file."""
    return json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
