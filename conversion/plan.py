"""The plan of a conversion in either direction, made of the config and the tensor headers.

Tensors are read where a family's variant depends on values, or where one that is left out must have certain ones.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.declared_fields import other_entries
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import NEVER_FOLLOWED, is_ours
from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.json_files import json_text
from blockformer.files.quantized import check_plain, refuse_quantized, without_empty
from blockformer.files.safetensors_io import HasHeader, torch_name
from blockformer.model_classes import CONFIGS
from blockformer.publishing.repo_code import ABOUT_THE_FILE, full_auto_map
from blockformer.publishing.strict_loading import check_blocks
from blockformer.publishing.write_repo import bytes_by_dtype

from .arguments import dtype_name
from .families.architectures import FSDP
from .families.further import FIELD as FURTHER_LAYERS
from .families.further import FURTHER
from .families.head import VALUE_HEAD, VALUE_HEAD_NOTE
from .families.registry import Family, family_by_name, family_for, family_of, twins_of
from .model_tensors import by_sources, expected_tensors, stored_pairs, unread_pooler, with_sources, without_copies
from .origin import Origin, read_origin
from .other_entries import carry_others, others_for
from .rules.groups import Group, targets_of
from .rules.in_turn import in_turn
from .rules.table import RuleTable
from .storage.awq import AWQ
from .storage.formats import format_of
from .storage.low_bits import LowBitFormat, view_of
from .storage.spelling import Spellings, names_in_class
from .storage.unused_tensors import unused_groups
from .storage.variant import CheckpointVariant


@dataclass
class Plan:
    """A planned conversion.

    Attributes:
        family: the official family.
        to_official: the direction.
        source_config, target_config: configuration objects of both layouts.
        source_class, target_class: model classes of both layouts.
        config_json: the target's `config.json`.
        groups: what to read and write.
        tied: pairs of stored target tensors that must be equal.
        parameters: how many the model has.
        others: how many numbers the official model holds beyond them, in other towers.
        variant: how the official checkpoint is written.
        official_arguments: what the official class takes in addition to its config.
        origin: what the repo records of an official checkpoint for the way back.
        files: on the way back, what the record says of the files next to the weights.
        read_plain: reads all weights of the official checkpoint in a dtype, where its class cannot: some have few bits,
            or all lie under a key of a pickle; else None.
        not_runnable: why the official model cannot be run, or None.
        notes: what a user must know about the conversion.
    """

    family: Family
    variant: CheckpointVariant
    to_official: bool
    source_config: PretrainedConfig
    source_class: type[PreTrainedModel]
    target_config: PretrainedConfig
    target_class: type[PreTrainedModel]
    config_json: str
    groups: list[Group]
    tied: list[tuple[str, str]]
    parameters: int
    others: int = 0
    official_arguments: dict[str, Any] = field(default_factory=dict)
    origin: Origin | None = None
    files: dict[str, Any] = field(default_factory=dict)
    read_plain: Callable[[Checkpoint, torch.dtype], dict[str, Tensor]] | None = None
    not_runnable: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_class(self, name: str) -> str:
        """The name that today's official class gives a tensor of the checkpoint."""
        return self.family.names.spelled(self.variant).to_class(name)

    @property
    def sizes(self) -> dict[torch.dtype, int]:
        """Bytes by dtype, the largest share first."""
        targets = targets_of(self.groups).values()
        return bytes_by_dtype((target.name, target.dtype, target.shape) for target in targets)

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype with the largest share, except 8 bits, which are for storing only."""
        return next((dtype for dtype in self.sizes if dtype.is_floating_point and dtype.itemsize > 1), torch.float32)


def plan_in(
    checkpoint: Checkpoint, family_name: str | None, cast: torch.dtype | None, dequantize: bool = False
) -> Plan:
    """Official -> ours; `dequantize` turns 4-bit linear layers into plain weights of the dtype `cast`."""
    official = checkpoint.config
    if is_ours(official):
        raise ConversionError(
            f"{checkpoint.folder}: is in Blockformer's layout already; load it with `import blockformer` and an Auto "
            "class, or convert it with to_official=True"
        )
    check_plain(official, checkpoint.tensors)
    low_bits = format_of(official, checkpoint.tensors)
    if dequantize and not (low_bits is not None and low_bits.may_have_4_bits and cast is not None):
        raise ConversionError(
            f"{checkpoint.folder}: has no 4-bit weights to dequantize; use dtype (--dtype) to cast plain ones"
        )
    family = family_of(official) if family_name is None else family_by_name(family_name)
    kept = None if low_bits is None or dequantize else low_bits.kept_entries(official, family.names.low_bits)
    view = None
    if low_bits is not None and kept is not official:
        view = view_of(low_bits, checkpoint, cast or torch.float32, kept)
    tensors: Mapping[str, HasHeader] = checkpoint.tensors
    read, to_load = checkpoint.read, None
    if view is not None:
        to_load = view.low_bits.to_load(official)
        official, tensors, read = view.entries, view.tensors, view.read
    variant = family.names.variant_of(official, tensors, read)
    if view is not None and FURTHER not in variant.traits and official.get(FURTHER_LAYERS):
        official = {**official, FURTHER_LAYERS: 0}  # they are left out below
    stored = names_in_class(tensors, family.names.spelled(variant))
    config = family.settings.our_config(family.config_from(official, variant))
    carry_others(family, official, config)
    if cast is not None:
        config.dtype = cast
    head = family.names.head(variant)
    shapes, tied, parameters = expected_tensors(head.model_class, config)
    shapes |= unread_pooler(head.model_class, config)
    layout = family.names.layout(variant, config)
    further = layout.further_layers(stored)
    if view is not None:
        needed = layout.shapes_before(shapes) if view.spare else {}
        stored = {name: own for name, own in stored.items() if own not in view.spare or name in needed}
        view.low_bits.check_plain(tensors, {*stored.values()} - {stored[name] for name in further})
    headers = {name: tensors[own] for name, own in stored.items()}
    to_class = RuleTable(family.names.storage(variant, config), layers=layout.layers).plan(headers, rest=True)
    to_ours = layout.plan(targets_of(to_class), shapes, optional=tied, dtype=cast)
    groups = with_sources(in_turn(to_class, to_ours), stored)
    used = {name for group in groups for name in group.sources}
    further = [name for name in further if stored[name] not in used]
    if view is not None:
        groups = in_turn(view.groups, groups)
        used |= {stored[name] for name in further} | view.spare  # unlike all that goes back out
    unused = [name for name in tensors if name not in used]
    values = [name for name in unused if name in VALUE_HEAD]
    _check_unused(checkpoint.folder, read, unused, family, variant, {*values, *(stored[name] for name in further)})
    of_further = "left out" if view is not None else "kept for the way back"
    return Plan(
        family=family,
        variant=variant,
        to_official=False,
        source_config=family.settings.official_config(official if to_load is None else to_load),
        source_class=head.official_class,
        target_config=config,
        target_class=head.model_class,
        config_json=config.to_json_string(),
        groups=groups,
        tied=stored_pairs(tied, groups),
        parameters=parameters,
        official_arguments=family.names.class_arguments(variant),
        origin=None if family.is_file else Origin(family, official, variant, unused),
        read_plain=_reader(checkpoint, low_bits, to_load, kept is not None),
        not_runnable=family.oracle.not_runnable(family.name, config),
        notes=[
            *family.names.head_note(official, variant),
            *([] if view is None else view.low_bits.notes(checkpoint.config, kept is not None)),
            *family.names.notes(variant),
            *_notes_on(further, of_further, config),
            *([VALUE_HEAD_NOTE] if values else []),
        ],
    )


def _reader(
    checkpoint: Checkpoint, low_bits: LowBitFormat | None, to_load: Mapping[str, Any] | None, exact: bool
) -> Callable[..., dict[str, Tensor]] | None:
    """What reads a checkpoint for the official class, which cannot read the file itself; None where it can."""
    if low_bits is not None:
        return partial(low_bits.read_plain, exact=exact) if to_load is None else None
    if checkpoint.wrapper is None or checkpoint.is_file:
        return None
    return lambda opened, dtype: {name: opened.read(name).to(dtype) for name in opened.tensors}


def plan_out(checkpoint: Checkpoint, family_name: str | None, cast: torch.dtype | None) -> Plan:
    """Ours -> official."""
    if not is_ours(checkpoint.config):
        raise ConversionError(
            f"{checkpoint.folder}: is not in Blockformer's layout, and an official layout need not be converted "
            "back: leave out to_official=True"
        )
    refuse_quantized(checkpoint.config, checkpoint.tensors)
    config = our_config(checkpoint.config)
    origin = read_origin(checkpoint)
    if family_name is not None:
        family = family_by_name(family_name)
    elif origin is not None and not origin.family.differences(config):
        family = origin.family
    else:
        family = family_for(config)
    of_twins = [] if family_name is not None or origin is not None else _note_on_twins(family, config)
    if origin is not None and origin.family is not family:
        origin = None
    variant = family.names.variant_for(config, None if origin is None else origin.variant)
    official = _official_settings(family, config, origin) | others_for(family, config)
    entry = dtype_entry(official)
    if (dtype := cast or config.dtype) not in (None, getattr(torch, str(official.get(entry)), None)):  # "half" stays
        official[entry] = torch_name(dtype)
    as_before = origin is not None and origin.variant == variant
    unused = unused_groups(checkpoint, origin.unused if origin is not None and as_before else [], cast)
    head, layout = family.names.head(variant), family.names.layout(variant, config)
    our_class = head.model_class
    shapes, tied, parameters = expected_tensors(our_class, config)
    pooler = unread_pooler(our_class, config)
    stored = without_copies(by_sources(checkpoint.tensors, tied), tied, layout, checkpoint.parts)
    headers = {name: checkpoint.tensors[own] for name, own in stored.items()}
    to_class = layout.plan(
        headers,
        layout.shapes_before(shapes | pooler),
        reverse=True,
        optional=layout.shapes_before({name: shapes[name] for name in tied} | pooler),
        dtype=cast,
    )
    storage = RuleTable(family.names.storage(variant, config), layers=layout.layers)
    to_file = storage.plan(targets_of(to_class), reverse=True, rest=True)
    groups = with_sources(in_turn(to_class, to_file), stored)
    names = family.names.spelled(variant)
    return Plan(
        family=family,
        variant=variant,
        to_official=True,
        source_config=config,
        source_class=our_class,
        target_config=family.settings.official_config(official),
        target_class=head.official_class,
        config_json=json_text(official),
        groups=[group.renamed(names.to_file) for group in groups] + unused,
        tied=[(names.to_file(first), names.to_file(second)) for first, second in _tied_pairs(tied, to_class)],
        parameters=parameters,
        official_arguments=family.names.class_arguments(variant),
        files={} if origin is None else _files_of(origin, official),
        read_plain=None if getattr(config, "linear_bits", None) is None else AWQ.read_plain,
        not_runnable=family.oracle.not_runnable(family.name, config),
        notes=[
            *of_twins,
            *family.names.notes_on_writing(config),
            *_further_layers(family, names, layout, unused, config),
        ],
    )


def _note_on_twins(family: Family, config: PretrainedConfig) -> list[str]:
    """A note if only the file says which family a model was."""
    twins = twins_of(family, config)
    if not twins:
        return []
    named = " or ".join(map(shown, twins))
    return [
        f"no conversion.json names the family: written as {shown(family.name)}; {named} (--family) computes the same"
    ]


def _tied_pairs(tied: Mapping[str, str], groups: Iterable[Group]) -> list[tuple[str, str]]:
    """Official tensors that are made of two tied ones of ours, where both are stored."""
    made = {group.sources[0]: group.targets[0].name for group in groups}
    return [(made[name], made[source]) for name, source in tied.items() if name in made and source in made]


def _further_layers(
    family: Family, spellings: Spellings, layout: RuleTable, unused: list[Group], config: PretrainedConfig
) -> list[str]:
    """A note on layers after the model's last one, whether they are written or missing."""
    found = layout.further_layers(map(spellings.to_class, targets_of(unused)))
    if found or not layout.has_further_layers or getattr(config, FURTHER_LAYERS, False):
        return _notes_on(found, "written unchanged", config)
    return [f"layers that predict further tokens, which checkpoints of {family.name} may have, are not written"]


def _notes_on(names: Sequence[str], what: str, config: PretrainedConfig) -> list[str]:
    if not names:
        return []
    if getattr(config, FURTHER_LAYERS, 0):
        first = f"({shown(names[0])} is the first)"
        return [f"{len(names)} more tensors of layers that predict further tokens {first}, such as copies, are {what}"]
    return [
        f"layers that predict further tokens are not part of the model; their {len(names)} tensors "
        f"({shown(names[0])} is the first) are {what}"
    ]


def _check_unused(
    folder: Path,
    read: Callable[[str], Tensor],
    names: list[str],
    family: Family,
    variant: CheckpointVariant,
    free: Collection[str],
) -> None:
    """Refuse tensors that cannot be left out; `free` are layers that no model has, which need not be read."""
    to_class = family.names.spelled(variant).to_class
    looked_at = [name for name in names if name not in free and family.names.reads_ignored(to_class(name))]
    reasons = {name: family.names.check_ignored(to_class(name), read(name)) for name in looked_at}
    lines = [f"{shown(name)} {reason}" for name, reason in reasons.items() if reason]
    if lines:
        raise ConversionError(f"{folder}: tensors that cannot be left out:{listed(lines)}")


def our_config(entries: Mapping[str, Any]) -> PretrainedConfig:
    """The config object for a `config.json` in our layout.

    Raises:
        ConversionError: it is not in our layout, or its settings are refused.
    """
    model_type = entries.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIGS:
        raise ConversionError(f"config.json: model_type {shown(model_type)} is not one of ours")
    kept = {name: value for name, value in without_empty(entries).items() if name not in NEVER_FOLLOWED}
    try:
        check_blocks(entries.get("blocks"), "")
        config = CONFIGS[model_type](**copy.deepcopy(kept))
    except (ValueError, TypeError) as error:
        raise ConversionError(f"config.json: {error}") from error
    if config.architectures:
        config.architectures = [architecture_of(config)]
    return config


def architecture_of(config: PretrainedConfig) -> str:
    """The model class that a config names; if it names none, the writing or basic model of its topology.

    Raises:
        ConversionError: it names a class that is not one of its topology.
    """
    classes = type(config).auto_classes
    kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
    usual = next(classes[kind] for kind in kinds if kind in classes).rpartition(".")[2]
    if not config.architectures:
        return usual
    known = {target.rpartition(".")[2] for target in full_auto_map(config).values()}
    name = str(config.architectures[0])
    if name not in known and (inner := name.removeprefix(FSDP)) in known:
        return inner
    if name not in known:
        raise ConversionError(
            f"config.json: architectures names {shown(name)}, which is not a model of Blockformer for "
            f'{type(config).__name__}; write the class of these weights, such as "architectures": ["{usual}"]'
        )
    return name


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The torch dtype of a name.

    Raises:
        ConversionError: weights cannot be cast to it.
    """
    name = dtype_name(dtype)
    return None if name is None else getattr(torch, name)


def _official_settings(family: Family, config: PretrainedConfig, origin: Origin | None) -> dict[str, Any]:
    """The official config: the one the model came with if it still describes the model, else a new one.

    Entries of the old one that the official class does not know are always kept.
    """
    fresh = family.config_to(config)
    if origin is None:
        return fresh
    old = {name: value for name, value in origin.config.items() if name not in NEVER_FOLLOWED}
    try:
        before = family.settings.our_config(family.config_from(old, origin.variant))
    except ConversionError:
        return fresh
    if _meaning(before) == _meaning(config) and config.architectures in (None, [], before.architectures):
        return copy.deepcopy(old)
    return {**{name: old[name] for name in family.settings.unused(old)}, **fresh}


def _meaning(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a config that describe the model itself."""
    hidden = {*ABOUT_THE_FILE, "dtype", *other_entries(config)}
    return {name: value for name, value in config.to_dict().items() if name not in hidden}


def _files_of(origin: Origin, official: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the files, for a config that is written now.

    Generation settings that the source had only in its `config.json` stay a file where that one is rewritten.
    """
    hidden = ("dtype", "torch_dtype", *NEVER_FOLLOWED)
    before, after = ({k: v for k, v in each.items() if k not in hidden} for each in (origin.config, official))
    if before == after:
        return origin.files
    written = {name: sha for name, sha in origin.files.get("written", {}).items() if name != "generation_config.json"}
    return {**origin.files, "written": written}


def dtype_entry(entries: Mapping[str, Any]) -> str:
    """The name that a `config.json` has for the dtype: `dtype`, or `torch_dtype` as before transformers 5."""
    return "torch_dtype" if "torch_dtype" in entries and "dtype" not in entries else "dtype"
