"""AFM (Arcee, 2025): Llama with a network without a gate, and squared ReLU."""

from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, NORMS, PLAIN_MLP, LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "arcee",
    "Arcee",
    spans="transformer.",
    layer={**ATTENTION, **PLAIN_MLP, **NORMS},
    fields={"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
)
