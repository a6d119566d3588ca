"""OLMoE (Muennighoff et al., 2024) and FlexOlmo (Shi et al., 2025): OLMo with experts in every layer."""

from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA
from .with_experts import FINE, ExpertNames

FIELDS = {"intermediate_size": ("intermediate_size", "moe_intermediate_size")}

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM OlmoeModel",
    structure={**LLAMA, "qk_norm": "projection"},
    fresh={**rotary(10_000.0), **FINE, "norm_topk_prob": False},
    names=ExpertNames(),
    settings=DecoderSettings(fields=FIELDS, unsupported={"clip_qkv": (None,)}),
)
FLEX_OLMO = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM FlexOlmoModel",
    structure={**LLAMA, "norm_placement": "output", "qk_norm": "projection"},
    fresh={**rotary(500_000.0), "num_experts": 4, "norm_topk_prob": False},
    names=ExpertNames(),
    settings=DecoderSettings(fields=FIELDS),
)
