"""Jais 2 (Inception, 2025): Llama with layer norms, and squared ReLU without a gate."""

from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, LAYER_NORM, NORMS, PLAIN_MLP, LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "jais2",
    "Jais2",
    layer={**ATTENTION, **PLAIN_MLP, **NORMS},
    fields={**LAYER_NORM, "attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
)
