"""Describe a model from only its config: settings, layer tree, parameters, memory, cache."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.conversion.families.composites import text_of
from blockformer.conversion.families.registry import family_of
from blockformer.conversion.guessing import missing_type
from blockformer.conversion.options import check_reading, refuse_given
from blockformer.conversion.plan import architecture_of, our_config
from blockformer.conversion.storage.awq import PARTS
from blockformer.conversion.storage.formats import format_of

from .declared_fields import axes_of, is_idle
from .files.checkpoint import Checkpoint
from .files.config_file import is_ours, read_config
from .files.containers import what_it_is
from .files.errors import ConversionError
from .files.json_files import read_json
from .files.names import FEW_BITS, has_weights
from .files.quantized import with_modelopt
from .files.sources import HUB_ID, WEIGHT_CHOICES, Reading, locate
from .model.attention import Attention
from .model.awq_linear import QuantizedLinear
from .model.axes import did_you_mean
from .model.experts import Experts
from .model_classes import MODELS
from .presets import preset

if TYPE_CHECKING:
    from typing_extensions import Unpack

SHOWN = ("size", "embeddings", "norm", "positions", "attention", "feed-forward", "weights", "head")
"""Groups of fields that describe the model rather than its training or use."""
MOST_LAYERS, MOST_LABELS = 1_000, 100_000
"""That are shown. Each takes a few milliseconds, or microseconds, though not the memory."""
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Summary:
    """A model's description.

    Attributes:
        name: the source as the user gave it.
        config: its config, in our layout.
        settings: group -> field -> value.
        tree: the modules with their sizes; equal layers are folded together.
        parameters: parameter count; tied weights count once.
        active: how many of them one token uses: of the experts only its own.
        memory: dtype -> bytes of the parameters.
        cache: dtype -> bytes per token while every layer's window has room; empty without a cache.
        state: dtype -> bytes per text, however long, of layers that keep a state; empty without any.
        sliding: layers whose cache stops growing at `sliding_window` tokens.
        notes: findings the user should know of.
    """

    name: str
    config: PretrainedConfig
    settings: dict[str, dict[str, Any]]
    tree: str
    parameters: int
    active: int
    memory: dict[str, int]
    cache: dict[str, int]
    state: dict[str, int]
    sliding: int
    notes: Sequence[str] = ()


def summarize(source: str | PathLike[str], **reading: "Unpack[Reading]") -> Summary:
    """Describe a folder, Hub id, `config.json` or preset. No weights are read.

    Args:
        source: what to describe.
        reading: which files are read, and from where; see `convert`.

    Raises:
        ConversionError: it is none of these, or our config cannot express its settings.
        CheckpointError: its weights, read only where `model_type` is missing, are damaged.
    """
    check_reading("summarize", reading, not_read=WEIGHT_CHOICES)
    name = os.fspath(source)
    path = Path(name)
    if name in preset() and not path.exists():
        refuse_given(reading, f"{name}: a preset")
        return describe(preset(name), name=f"preset {name}")
    if path.is_dir() or path.suffix != ".json":
        try:
            path = locate(source, weights=False, **reading).path / "config.json"
        except ConversionError as error:
            hint = did_you_mean(name, preset()).replace("mean", "mean the preset")
            said = str(error)
            if HUB_ID.fullmatch(name) and "/" not in name:
                said = said.replace("no folder of that name", "no folder or preset of that name")
            raise ConversionError(f"{said.removesuffix('?')}.{hint}" if hint else said) from error
    else:
        refuse_given(reading, f"{path}: only a config.json")
    if not path.exists():
        what = what_it_is(path.parent) if path.name == "config.json" and path.parent.is_dir() else None
        hint = "name a folder, a config.json or a preset" if what is None else what
        raise ConversionError(f"{path}: no such file; {hint}")
    entries = read_config(path)
    if path.name == "config.json" and (aside := path.with_name(FEW_BITS[0])).exists() and not is_ours(entries):
        entries = with_modelopt(entries, read_json(aside))
    if not isinstance(entries.get("model_type"), str) and path.name == "config.json" and has_weights(path.parent):
        with Checkpoint(path.parent) as checkpoint:  # only its headers, for the family that they fit
            raise missing_type(checkpoint)
    return describe(*config_of(entries), name)


def config_of(entries: Mapping[str, Any]) -> tuple[PretrainedConfig, list[str]]:
    """Our config for a `config.json` in either layout, and notes on it."""
    if type(labels := entries.get("num_labels")) is int and labels > MOST_LABELS:
        raise ConversionError(f"config.json: num_labels ({labels:,}) must be at most {MOST_LABELS:,} to be shown")
    if is_ours(entries):
        return our_config(entries), []
    text, notes = text_of(entries), []
    if text is not None:
        entries, notes = text.entries, [f"the text model of a {text.model_type} checkpoint"]
    family, low_bits = family_of(entries), format_of(entries)
    kept = None if low_bits is None else low_bits.kept_entries(entries, family.names.low_bits)
    if low_bits is not None and kept is None:
        notes += low_bits.notes_on_paper(entries)
        kept = low_bits.plain_entries(entries)
    entries = entries if kept is None else kept
    return family.settings.our_config(family.config_from(entries)), [*notes, *family.settings.unused_note(entries)]


def describe(config: PretrainedConfig, notes: Sequence[str] = (), name: str = "") -> Summary:
    """The summary of a config."""
    model = on_paper(config)
    parameters = model.num_parameters()
    cached, has_states = cached_numbers(model), state_bytes(model, 1) > 0
    return Summary(
        name=name,
        config=config,
        settings=shown_settings(config),
        tree=repr(model),
        parameters=parameters,
        active=parameters - idle_parameters(model),
        memory=_memory(model, parameters),
        cache={dtype: cached * size for dtype, size in BYTES.items() if dtype != "int8" and cached},
        state={dtype: state_bytes(model, size) for dtype, size in BYTES.items() if dtype != "int8" and has_states},
        sliding=config.layer_types.count("sliding_attention"),
        notes=notes,
    )


def on_paper(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a config without memory, that gives probabilities and runs experts without looking at values.

    Raises:
        ConversionError: the config names an architecture that is not one of ours, or too many layers.
    """
    layers = max(config.num_hidden_layers, getattr(config, "decoder_layers", None) or 0)
    if layers > MOST_LAYERS:
        raise ConversionError(f"config.json: a model of {layers:,} layers; at most {MOST_LAYERS:,} are shown")
    architecture = architecture_of(config)
    model_class = MODELS.get(architecture)
    if model_class is None:
        raise ConversionError(f"config.json: architectures names {architecture!r}, which is not one of our classes")
    without_values = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"):
        return model_class(type(config).from_dict(config.to_dict(), **without_values)).eval()


def shown_settings(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """Group -> field -> value, without fields that have no effect next to the others."""
    settings: dict[str, dict[str, Any]] = {}
    for name, axis in axes_of(config).items():
        if axis.group in SHOWN and not is_idle(name, vars(config)):
            settings.setdefault(axis.group, {})[name] = getattr(config, name)
    if not is_idle("layer_types", vars(config)):
        kinds = config.layer_types
        settings["attention"]["layer_types"] = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted(set(kinds)))
    return settings


def idle_parameters(model: torch.nn.Module) -> int:
    """The parameters of the experts that a token is not sent to."""
    sparse = [module for module in model.modules() if isinstance(module, Experts)]
    idle = sum(sum(weight[0].numel() for weight in module.parameters()) for module in sparse)
    return int(idle * (model.config.num_experts - model.config.num_experts_per_tok)) if sparse else 0


def cached_numbers(model: torch.nn.Module) -> int:
    """The numbers that a token leaves in the cache of all layers; 0 without a cache."""
    layers = (module for module in model.modules() if isinstance(module, Attention))
    return sum(layer.cached_numbers for layer in layers if not layer.is_cross_attention)


def state_bytes(model: torch.nn.Module, size: int) -> int:
    """The bytes that a text of any length leaves in layers that keep a state, in a dtype of so many bytes."""
    return sum(module.state_bytes(size) for module in model.modules() if hasattr(module, "state_bytes"))


def _memory(model: torch.nn.Module, parameters: int) -> dict[str, int]:
    """Dtype -> bytes of the parameters."""
    low = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not low:
        return {dtype: parameters * size for dtype, size in BYTES.items()}
    plain = parameters - sum(module.in_features * module.out_features for module in low)
    packed = sum(getattr(module, part).nbytes for module in low for part in PARTS)
    return {f"4 bits and {dtype}": packed + plain * BYTES[dtype] for dtype in ("float32", "bfloat16")}
