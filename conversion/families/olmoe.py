"""OLMoE (Muennighoff et al., 2024) and FlexOlmo (Shi et al., 2025): OLMo with experts in every layer."""

from .decoder import ALL_ATTENTION_BIASES, ATTENTION, LLAMA, MLP, NORMS, OUTPUT_NORMS, Q_AND_K_NORM
from .fresh import rotary
from .with_experts import FINE, ROUTER_FIELDS, ExpertsFamily

FIELDS = {
    **ROUTER_FIELDS,
    "num_experts": "num_experts",
    "intermediate_size": ("intermediate_size", "moe_intermediate_size"),
    "attention_bias": ALL_ATTENTION_BIASES,
}

OLMOE = ExpertsFamily(
    "olmoe",
    "OlmoeConfig",
    "OlmoeForCausalLM OlmoeModel",
    structure={**LLAMA, "qk_norm": "projection"},
    fresh={**rotary(10_000.0), **FINE, "norm_topk_prob": False},
    layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
    fields=FIELDS,
    unsupported={"clip_qkv": (None,)},
)
FLEX_OLMO = ExpertsFamily(
    "flex_olmo",
    "FlexOlmoConfig",
    "FlexOlmoForCausalLM FlexOlmoModel",
    structure={**LLAMA, "norm_placement": "output", "qk_norm": "projection"},
    fresh={**rotary(500_000.0), "num_experts": 4, "norm_topk_prob": False},
    layer={**ATTENTION, **MLP, **OUTPUT_NORMS, **Q_AND_K_NORM},
    fields=FIELDS,
)
