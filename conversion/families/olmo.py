"""OLMo (Groeneveld et al., 2024), OLMo 2 and OLMo 3 (OLMo team, 2024 and 2025).

OLMo has layer norms without weights, and may clip queries, keys and values. OLMo 2 has norms after the sub-layers, and
one on all queries and on all keys; OLMo 3 has windows, too.
"""

from ..values import RopeByLayerType
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import by_type, every, rotary
from .shared import ATTENTION, LLAMA, MLP
from .with_experts import FINE, ExpertNames

STRUCTURE = {**LLAMA, "norm_placement": "output", "qk_norm": "projection"}
OLMO = Family(
    "olmo",
    "OlmoForCausalLM OlmoModel OlmoForSequenceClassification",
    structure={**LLAMA, "norm_type": "layer_norm", "norm_weight": "none", "norm_bias": False, "norm_eps": 1e-5},
    fresh={**rotary(10_000.0), "clip_qkv": 8.0},
    names=DecoderNames(layer={**ATTENTION, **MLP}, outer={"embed_tokens": "embed_tokens"}),
    settings=DecoderSettings(fields={"clip_qkv": "clip_qkv"}),
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM Olmo2Model Olmo2ForSequenceClassification",
    structure=STRUCTURE,
    fresh=rotary(500_000.0),
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM Olmo3Model Olmo3ForSequenceClassification",
    structure=STRUCTURE,
    fresh={**rotary(500_000.0), **every(4, 4096), **by_type(500_000.0, 500_000.0)},
    settings=DecoderSettings(rope=RopeByLayerType()),
)


# OLMoE (Muennighoff et al., 2024) and FlexOlmo (Shi et al., 2025): OLMo with experts in every layer.
EXPERTS = {"intermediate_size": ("intermediate_size", "moe_intermediate_size")}

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM OlmoeModel",
    structure={**LLAMA, "qk_norm": "projection"},
    fresh={**rotary(10_000.0), **FINE, "norm_topk_prob": False},
    names=ExpertNames(),
    settings=DecoderSettings(fields=EXPERTS, unsupported={"clip_qkv": (None,)}),
)
FLEX_OLMO = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM FlexOlmoModel",
    structure={**LLAMA, "norm_placement": "output", "qk_norm": "projection"},
    fresh={**rotary(500_000.0), "num_experts": 4, "norm_topk_prob": False},
    names=ExpertNames(),
    settings=DecoderSettings(fields=EXPERTS),
)
