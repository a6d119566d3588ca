"""Qwen3 (Yang et al., 2025): a norm on queries and keys; `attention_bias` also covers the output projection."""

from .fields import WindowByLayer
from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, MLP, NORMS, Q_AND_K_NORM, LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "qwen3",
    "Qwen3",
    layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
    spans="transformer.",
    fields={"attention_bias": ALL_ATTENTION_BIASES},
    window=WindowByLayer(),
)
