"""GLM-4 (GLM team, 2024) and GLM-4-0414 (2025): neighbouring channels of a part of each head turn.

The later one has a norm before and after each sub-layer.
"""

from ..values import Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import ATTENTION, FUSED_MLP, LLAMA, NORMS

FIELDS = {"attention_bias": "attention_bias"}
GLM = Family(
    "glm",
    "GlmForCausalLM GlmModel GlmForSequenceClassification GlmForTokenClassification",
    structure=LLAMA,
    fresh={**rotary(10_000.0, 0.5), "attention_bias": True, "norm_eps": 1.5625e-07, "eos_token_id": 2},
    names=DecoderNames(layer={**ATTENTION, **FUSED_MLP, **NORMS}, pairs=True),
    settings=DecoderSettings(fields=FIELDS, rope=Rope(by_part=True)),
)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM Glm4Model Glm4ForSequenceClassification Glm4ForTokenClassification",
    structure={**LLAMA, "norm_placement": "pre_output"},
    fresh={**rotary(10_000.0, 0.5), "norm_eps": 1e-5, "eos_token_id": 2},
    names=DecoderNames(
        layer={
            **ATTENTION,
            **FUSED_MLP,
            **NORMS,
            "post_self_attn_layernorm": "self_attn_output_norm",
            "post_mlp_layernorm": "mlp_output_norm",
        },
        pairs=True,
    ),
    settings=DecoderSettings(fields=FIELDS, rope=Rope(by_part=True)),
)
