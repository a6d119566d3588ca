"""Which settings of a preset only make sense with others: when those are replaced, they are dropped."""

from collections.abc import Callable, Mapping
from typing import Any

from ..model.axes import BLOCKS, axes
from ..model.delta_rule import WITHOUT_STATES
from ..model.experts import ExpertsFields
from ..model.latent_attention import OF_LATENTS
from ..model.positions import adds_to_scores


def _has_experts(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("num_experts")) and _has_our_network(settings)


def _has_our_network(settings: Mapping[str, Any]) -> bool:
    return settings["mlp_type"] is None


def _has_groups(settings: Mapping[str, Any]) -> bool:
    size, rest = divmod(settings.get("num_experts") or 0, settings["num_expert_groups"] or 1)
    most = size * settings["num_expert_groups_per_tok"]
    fits = not rest and settings["experts_per_group_score"] <= size and settings["num_experts_per_tok"] <= most
    return fits and _has_experts(settings)


def _has_plain_scores(settings: Mapping[str, Any]) -> bool:
    return not adds_to_scores(settings["position_type"])


def _may_slide(settings: Mapping[str, Any]) -> bool:
    return _has_plain_scores(settings) and bool(settings["sliding_window"])


def _may_keep_states(settings: Mapping[str, Any]) -> bool:
    types = settings["layer_types"]
    types = types(settings) if callable(types) else types or ()
    is_alone = not any(settings.get(name) for name in WITHOUT_STATES)
    return is_alone and _has_plain_scores(settings) and not BLOCKS["layer_types"].keys().isdisjoint(types)


def _has_latents(settings: Mapping[str, Any]) -> bool:
    return settings["position_type"] == "rotary" and settings["attention_type"] is None


def _have_one_kind(settings: Mapping[str, Any]) -> bool:
    return (settings["norm_placement"] == "post") == (settings.get("decoder_norm_placement") == "post")


# The norms that have each factor.
_FACTORS = {"none": ("layer_norm",), "zero_centered": ("layer_norm", "rms_norm")}


STAYS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    **{name: _has_experts for name in axes(ExpertsFields) if name != "num_experts"},
    **dict.fromkeys(("num_experts", "float32_down_proj", "chunk_size_feed_forward"), _has_our_network),
    **dict.fromkeys(("num_expert_groups", "num_expert_groups_per_tok", "experts_per_group_score"), _has_groups),
    "shared_expert_gate": lambda settings: _has_experts(settings) and settings["shared_expert_intermediate_size"] > 0,
    "rope_parameters": lambda settings: settings["position_type"] == "rotary",
    "rope_layers": lambda settings: settings["position_type"] == "rotary",
    **dict.fromkeys(("kv_lora_rank", *OF_LATENTS), _has_latents),
    "position_offset": lambda settings: settings["position_type"] == "learned",
    "relative_bias_per_layer": lambda settings: settings["position_type"] == "relative_bias",
    "sliding_window": _may_slide,
    "layer_types": lambda settings: _may_slide(settings) or _may_keep_states(settings),
    "decoder_layer_types": _may_slide,
    "attn_logit_softcapping": _has_plain_scores,
    "attention_sinks": _has_plain_scores,
    "decoder_norm_placement": _have_one_kind,
    "residual": lambda settings: settings["norm_placement"] == "pre",
    "first_attention_norm": lambda settings: (
        (settings["norm_placement"], settings["residual"]) == ("pre", "sequential")
    ),
    "final_norm": lambda settings: settings["norm_placement"] != "post",
    "norm_weight": lambda settings: settings["norm_type"] in _FACTORS.get(settings["norm_weight"], ()),
    "norm_bias": lambda settings: settings["norm_type"] == "layer_norm",
}
"""Field -> whether a preset's value of it stays with the other settings."""
