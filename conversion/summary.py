"""What a model is, from its config alone: settings by axis, the tree of layers, parameters, memory, cache."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from blockformer.awq_linear import QuantizedLinear

from .errors import ConversionError
from .families.awq import PARTS
from .families.registry import family_of
from .files.checkpoint import read_json
from .files.sources import locate
from .plan import architecture_of, is_ours, our_config

AXES: dict[str, tuple[str, ...]] = {
    "size": (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "decoder_layers",
        "max_position_embeddings",
    ),
    "norm": ("norm_type", "norm_placement", "norm_eps", "norm_bias", "embedding_norm", "final_norm"),
    "positions": ("position_type", "rope_parameters", "position_offset", "type_vocab_size"),
    "attention": (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "qk_norm",
        "attention_bias",
        "attention_output_bias",
        "attention_scale",
        "sliding_window",
        "layer_types",
        "add_cross_attention",
    ),
    "feed-forward": ("gated_mlp", "hidden_act", "mlp_bias"),
    "weights": ("linear_bits", "linear_group_size"),
    "head": (
        "tie_word_embeddings",
        "lm_head_transform",
        "lm_head_bias",
        "pooler_act",
        "embedding_scale",
        "logit_scale",
    ),
}
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Summary:
    """A model on paper.

    Attributes:
        name: where it comes from.
        config: its config, in our settings.
        settings: axis -> field -> value.
        tree: the layers with their sizes, equal ones folded together.
        parameters: how many, tied ones once.
        memory: dtype -> bytes of the parameters.
        cache: dtype -> bytes that one more token takes while every layer's window has room; empty without a cache.
        sliding: layers whose cache stops growing at `sliding_window` tokens.
    """

    name: str
    config: PretrainedConfig
    settings: dict[str, dict[str, Any]]
    tree: str
    parameters: int
    memory: dict[str, int]
    cache: dict[str, int]
    sliding: int


def summarize(source: str | PathLike[str]) -> Summary:
    """Look at a folder, Hub id, `config.json` or preset name; no weights are read.

    Raises:
        ConversionError: it is none of these, or its settings cannot be expressed.
    """
    from blockformer.presets import PRESETS, preset

    name = os.fspath(source)
    path = Path(name)
    if name in PRESETS and not path.exists():
        return describe(preset(name), f"preset {name}")
    if path.is_dir() or path.suffix != ".json":
        path = locate(source, weights=False)[0] / "config.json"
    if not path.exists():
        raise ConversionError(f"{path}: no such file; name a folder, a config.json or a preset")
    return describe(config_of(read_json(path)), name)


def config_of(entries: Mapping[str, Any]) -> PretrainedConfig:
    """Our config of a `config.json` in either layout."""
    if is_ours(entries):
        return our_config(entries)
    family = family_of(entries)
    return family.our_config(family.config_from(entries))


def describe(config: PretrainedConfig, name: str = "") -> Summary:
    """The summary of a config."""
    import blockformer

    architecture = architecture_of(config)
    model_class = getattr(blockformer, architecture, None)
    if model_class is None:
        raise ConversionError(f"config.json: architectures names {architecture!r}, which is no class of ours")
    with torch.device("meta"):
        model = model_class(config)
    parameters = model.num_parameters()
    layers = getattr(config, "decoder_layers", config.num_hidden_layers)
    values = 2 * config.num_key_value_heads * config.head_dim * layers
    body = getattr(model, model.base_model_prefix, model)
    is_causal = getattr(getattr(body, "decoder", body), "is_causal", False)
    settings = {
        axis: {field: getattr(config, field) for field in fields if hasattr(config, field)}
        for axis, fields in AXES.items()
    }
    if not any(kind == "sliding_attention" for kind in config.layer_types):
        del settings["attention"]["layer_types"], settings["attention"]["sliding_window"]
    else:
        kinds = config.layer_types
        settings["attention"]["layer_types"] = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted(set(kinds)))
    if config.linear_bits is None:
        del settings["weights"]
    return Summary(
        name=name,
        config=config,
        settings=settings,
        tree=repr(model),
        parameters=parameters,
        memory=_memory(model, parameters),
        cache={dtype: values * size for dtype, size in BYTES.items() if dtype != "int8" and is_causal},
        sliding=config.layer_types.count("sliding_attention"),
    )


def _memory(model: torch.nn.Module, parameters: int) -> dict[str, int]:
    """Dtype -> bytes of the parameters."""
    low = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not low:
        return {dtype: parameters * size for dtype, size in BYTES.items()}
    plain = parameters - sum(module.in_features * module.out_features for module in low)
    packed = sum(getattr(module, part).nbytes for module in low for part in PARTS)
    return {f"4 bits and {dtype}": packed + plain * BYTES[dtype] for dtype in ("float32", "bfloat16")}
