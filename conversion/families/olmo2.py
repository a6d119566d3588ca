"""OLMo 2 (OLMo team, 2024): norms after the sub-layers, and one on all queries and on all keys."""

from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, MLP, OUTPUT_NORMS, Q_AND_K_NORM, LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "olmo2",
    "Olmo2",
    layer={**ATTENTION, **MLP, **OUTPUT_NORMS, **Q_AND_K_NORM},
    fields={"attention_bias": ALL_ATTENTION_BIASES},
)
