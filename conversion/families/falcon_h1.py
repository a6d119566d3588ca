"""Falcon-H1 (TII, 2025): each layer adds attention and a selective state space, and much has a factor, as in muP."""

import functools
from typing import Any

from blockformer.files.errors import ConversionError

from ..values import Computed, Factor, NotExpressible, Rope, least_step
from ..values.states import OF_SCANS
from .bamba import NETWORK, NORMS, scan_rules, twice_the_width
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import ATTENTION, LLAMA

KIND = "attention_and_state_space"
FACTORS = (
    *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)
"""Factors of a layer, the same field in both layouts."""
OF_NETWORKS = ("mlp_gate_multiplier", "mlp_down_multiplier")
"""Ours, in the order of the official `mlp_multipliers`."""
OUTPUT_NORMS = {"none": (False, True), "after_gate": (True, False), "before_gate": (True, True)}
"""Our `mamba_output_norm` -> the official `mamba_rms_norm` and `mamba_norm_before_gate`."""


def _read(official) -> dict[str, Any]:
    config = official.config
    if bool(config.projectors_bias) is not bool(config.mamba_proj_bias):
        values = f"projectors_bias is {config.projectors_bias} and mamba_proj_bias {config.mamba_proj_bias}"
        raise ConversionError(f"config.json: {values}, but here all maps of a state space have biases, or none has")
    norms = {official: ours for ours, official in OUTPUT_NORMS.items()}
    norm = norms[config.mamba_rms_norm, config.mamba_norm_before_gate] if config.mamba_rms_norm else "none"
    return {
        "layer_types": [KIND] * config.num_hidden_layers,
        "sliding_window": None,
        "mamba_hidden_act": config.hidden_act,
        "mamba_output_norm": norm,
        "mamba_step_min": least_step(config),
        **{name: getattr(config, name) for name in OF_SCANS},
        **{name: float(getattr(config, name)) for name in FACTORS},
        **dict(zip(OF_NETWORKS, map(float, config.mlp_multipliers), strict=True)),
        "ssm_multipliers": [float(each) for each in config.ssm_multipliers],
    }


def _write(config, head) -> dict[str, Any]:
    if strange := sorted(set(config.layer_types) - {KIND}):
        raise NotExpressible("layer_types", KIND, strange[0])
    if config.mamba_hidden_act != config.hidden_act:
        raise NotExpressible("mamba_hidden_act", f"hidden_act ({config.hidden_act})", config.mamba_hidden_act)
    has_norm, before = OUTPUT_NORMS[config.mamba_output_norm]
    entries = {
        **{name: getattr(config, name) for name in (*OF_SCANS, *FACTORS)},
        "projectors_bias": config.mamba_proj_bias,
        "mamba_d_ssm": config.mamba_n_heads * config.mamba_d_head,
        "mamba_rms_norm": has_norm,
        "mlp_multipliers": [getattr(config, name) for name in OF_NETWORKS],
        "ssm_multipliers": config.ssm_multipliers or [1.0] * 5,
    }
    if has_norm:
        entries["mamba_norm_before_gate"] = before
    if config.mamba_step_min:
        entries["time_step_limit"] = [config.mamba_step_min, {"__float__": "Infinity"}]
    return entries


def _all_hybrid(settings: dict) -> list:
    return [KIND] * settings["num_hidden_layers"]


FAMILY = Family(
    "falcon_h1",
    "FalconH1ForCausalLM FalconH1Model",
    structure={**LLAMA, "mlp_type": "scaled"},
    fresh={
        **rotary(100_000_000_000.0),
        "layer_types": _all_hybrid,
        "mamba_n_heads": twice_the_width,
        "mamba_output_norm": "none",
        "norm_eps": 1e-5,
    },
    names=DecoderNames(
        layer={**ATTENTION, **NETWORK, **NORMS},
        outer={"embed_tokens": "embed_tokens", "final_layernorm": "norm"},
        more_rules=functools.partial(scan_rules, ours="self_attn.state_space", kind=KIND),
    ),
    settings=DecoderSettings(
        rope=Rope(),
        window=Computed(_read, _write),
        computed=(Factor("embedding_multiplier", "embedding_scale"), Factor("lm_head_multiplier", "logit_scale")),
        reads_whole=False,
    ),
)
