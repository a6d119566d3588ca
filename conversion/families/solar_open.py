"""Solar Open (Upstage, 2026): DeepSeek's experts in every layer, and Llama's attention."""

from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA
from .with_experts import (
    FINE,
    FLOAT32_ROUTER,
    SHARED_EXPERTS,
    ExpertNames,
    expert_groups,
    shared_experts,
)

FAMILY = Family(
    "solar_open",
    "SolarOpenConfig",
    "SolarOpenForCausalLM SolarOpenModel",
    structure={**LLAMA, **FLOAT32_ROUTER},
    fresh={**rotary(1_000_000.0), **FINE, "shared_expert_intermediate_size": 384, "norm_eps": 1e-5},
    names=ExpertNames(sparse=SHARED_EXPERTS),
    settings=DecoderSettings(
        fields={
            "moe_intermediate_size": ("intermediate_size", "moe_intermediate_size"),
            "attention_bias": "attention_bias",
        },
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(shared_experts("n_shared_experts"), expert_groups(2)),
        unsupported={"use_qk_norm": (None, False), "first_k_dense_replace": (None, 0)},
    ),
)
