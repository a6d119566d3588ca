"""Flint (Recursive, 2026): Qwen3-MoE with sigmoid scores, attention sinks and windows; only layers with one rotate."""

from ..storage.spelling import Ending
from ..values import Computed, only_sliding_layers_rotate
from .base import Family
from .decoder import DecoderSettings
from .fresh import every, rotary
from .shared import LLAMA, sinks
from .with_experts import FINE, SHARED, SPARSE_STEP, ExpertNames

FAMILY = Family(
    "flint",
    "FlintConfig",
    "FlintForCausalLM FlintModel",
    structure={
        **LLAMA,
        "qk_norm": True,
        "attention_sinks": True,
        "router_score": "sigmoid",
        "router_float32": True,
    },
    fresh={**rotary(10_000.0), **every(4, 513), **every(4), **FINE, "shared_expert_intermediate_size": 384},
    names=ExpertNames(
        more_rules=sinks,
        sparse=SHARED,
        spellings=[Ending({"self_attn.softmax_offset": "self_attn.sinks"})],
    ),
    settings=DecoderSettings(
        computed=(SPARSE_STEP, Computed(only_sliding_layers_rotate)),
    ),
)
