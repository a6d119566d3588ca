"""The fields that a config has, those of its blocks from outside included, and which of them need others.

Only `inspect`, its page and presets ask which field needs which, so that a published repo does not carry the answer.
"""

from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from .model.awq_linear import LinearFields
from .model.axes import BLOCKS, Axis, axes, blocks_of
from .model.experts import ExpertsFields
from .model.latent_attention import OF_LATENTS
from .model.positions import LEARNED, RELATIVE_BIAS, SINUSOIDAL
from .model.relative_bias import RelativeBiasFields

_OFF_BY_NONE = (*BLOCKS, "num_hidden_groups", "token_embedding_size")
NEEDS: tuple[tuple[Iterable[str], str, Collection[str]], ...] = (
    *(((name,), name, ()) for name in _OFF_BY_NONE),
    (axes(ExpertsFields), "num_experts", ()),
    (("shared_expert_gate",), "shared_expert_intermediate_size", ()),
    (("num_expert_groups_per_tok", "experts_per_group_score"), "num_expert_groups", ()),
    (("kv_lora_rank", *OF_LATENTS), "kv_lora_rank", ()),
    (axes(LinearFields), "linear_bits", ()),
    (("sliding_window", "layer_types", "decoder_layer_types"), "sliding_window", ()),
    (axes(RelativeBiasFields), "position_type", (*RELATIVE_BIAS, "disentangled")),
    (("relative_bias_per_layer",), "position_type", RELATIVE_BIAS),
    (("rope_parameters", "rope_layers"), "position_type", ("rotary",)),
    (("position_offset",), "position_type", (*LEARNED, *SINUSOIDAL)),
    (("first_attention_norm",), "norm_placement", ("pre",)),
    (("first_attention_norm",), "residual", ("sequential",)),
    (("norm_bias",), "norm_type", ("layer_norm",)),
)
"""Fields, the field without which they have no effect, and its values: where none are listed, all that are true."""


def is_idle(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a field has no effect next to the others.

    Args:
        name: the field.
        settings: fields and their values, such as `vars` of a config; fields that are not there are off.
    """
    return any(
        settings.get(other) not in values if values else not settings.get(other)
        for names, other, values in NEEDS
        if name in names
    )


def own_fields(settings: Mapping[str, Any]) -> dict[str, Axis]:
    """The fields of the blocks from outside that some settings name."""
    named = SimpleNamespace(**{axis: settings.get(axis) for axis in BLOCKS})
    return {name: each for block in blocks_of(named) for name, each in block.fields.items()}


def axes_of(config) -> dict[str, Axis]:
    """Every declared field of a config, by name: those of its class and those of its blocks."""
    return axes(type(config)) | own_fields(vars(config))


def other_entries(config) -> dict[str, Any]:
    """The entries of a config that are not its fields and that other libraries read, by name."""
    entries = config.to_dict()
    return {name: entries[name] for name in entries["other_entries"] or ()}
