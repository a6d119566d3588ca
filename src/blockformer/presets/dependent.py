"""Which settings of a preset go when others are replaced: settings without effect, and settings that are refused."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..declared_fields import has_states, is_idle, layer_types_of
from ..model.positions import adds_to_scores
from ..model.states import WITHOUT_STATES
from ..model.varied_attention import VARIED, WITHOUT_VARIED


def _has_groups(settings: Mapping[str, Any]) -> bool:
    size, rest = divmod(settings["num_experts"], settings["num_expert_groups"] or 1)
    most = size * settings["num_expert_groups_per_tok"]
    return not rest and settings["experts_per_group_score"] <= size and settings["num_experts_per_tok"] <= most


def _has_plain_scores(settings: Mapping[str, Any]) -> bool:
    return not adds_to_scores(settings["position_type"])


def _may_keep_states(settings: Mapping[str, Any]) -> bool:
    is_alone = _has_plain_scores(settings) and not any(settings.get(name) for name in WITHOUT_STATES)
    slides = "sliding_attention" in layer_types_of(settings)
    return (is_alone and slides is bool(settings.get("sliding_window"))) or not has_states(settings)


def _may_vary(settings: Mapping[str, Any]) -> bool:
    is_plain = settings["position_type"] in ("rotary", "none") and settings.get("qk_norm") in (None, False, True)
    return is_plain and not has_states(settings) and not any(settings.get(name) for name in WITHOUT_VARIED)


# The norms that have each factor.
_FACTORS = dict.fromkeys(("none", "zero_centered"), ("layer_norm", "rms_norm"))


FITS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    **dict.fromkeys(
        ("num_experts", "float32_down_proj", "chunk_size_feed_forward"), lambda settings: settings["mlp_type"] is None
    ),
    **dict.fromkeys(("num_expert_groups", "num_expert_groups_per_tok", "experts_per_group_score"), _has_groups),
    "kv_lora_rank": lambda settings: settings["position_type"] == "rotary" and settings["attention_type"] is None,
    "query_growth": lambda settings: settings["position_type"] == "rotary",
    "frequency_dtype": lambda settings: settings["position_type"] == "rotary",
    "padding_position": lambda settings: settings["padding_position"] == "index" or settings["position_offset"] > 0,
    "layer_types": _may_keep_states,
    **dict.fromkeys(VARIED, _may_vary),
    **dict.fromkeys(
        ("hidden_size_per_layer_input", "layer_scale"),
        lambda settings: settings["residual"] == "sequential" and not has_states(settings),
    ),
    **dict.fromkeys(("sliding_window", "attn_logit_softcapping", "attention_sinks"), _has_plain_scores),
    "decoder_norm_placement": lambda settings: (
        (settings["norm_placement"] == "post") == (settings["decoder_norm_placement"] == "post")
    ),
    "residual": lambda settings: settings["norm_placement"] == "pre",
    "final_norm": lambda settings: settings["norm_placement"] != "post",
    "norm_weight": lambda settings: settings["norm_type"] in _FACTORS.get(settings["norm_weight"], ()),
}
"""Field -> whether a preset's value of it is allowed with the other settings."""


def outdated(settings: Mapping[str, Any], given: Collection[str], defaults: Mapping[str, Any]) -> set[str]:
    """The settings that do not fit the given ones; one that goes may take others with it.

    Args:
        settings: all that differ from the defaults, the given ones included.
        given: settings that stay, whatever they are.
        defaults: every field of the config with its default.
    """
    known, gone = {**defaults, **settings}, set[str]()
    asked = settings.keys() & defaults.keys() - {*given}
    while more := {
        name for name in asked - gone if is_idle(name, known) or not FITS.get(name, lambda settings: True)(known)
    }:
        gone |= more
        known |= {name: defaults[name] for name in more}
    return gone
