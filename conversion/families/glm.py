"""GLM-4 (GLM team, 2024) and GLM-4-0414 (2025): neighbouring channels of a part of each head turn.

The later one has a norm before and after each sub-layer.
"""

from .llama_like import ATTENTION, FUSED_MLP, NORMS, LlamaLikeFamily
from .rope import Rope

FIELDS = {"attention_bias": "attention_bias"}
GLM = LlamaLikeFamily(
    "glm",
    "Glm",
    layer={**ATTENTION, **FUSED_MLP, **NORMS},
    pairs=True,
    fields=FIELDS,
    rope=Rope(by_part=True),
    extra_fields=["partial_rotary_factor"],
)
GLM4 = LlamaLikeFamily(
    "glm4",
    "Glm4",
    layer={
        **ATTENTION,
        **FUSED_MLP,
        **NORMS,
        "post_self_attn_layernorm": "self_attn_output_norm",
        "post_mlp_layernorm": "mlp_output_norm",
    },
    pairs=True,
    fields=FIELDS,
    rope=Rope(by_part=True),
    extra_fields=["partial_rotary_factor"],
)
