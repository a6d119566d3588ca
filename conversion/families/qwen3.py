"""Qwen3 (Yang et al., 2025): a norm on queries and keys; `attention_bias` also covers the output projection."""

from .fields import WindowByLayer
from .llama_like import ALL_ATTENTION_BIASES, O_BIAS, Q_AND_K_NORM, QKV_BIAS, LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "qwen3",
    "Qwen3",
    tensors=(*Q_AND_K_NORM, *QKV_BIAS, *O_BIAS),
    fields={"attention_bias": ALL_ATTENTION_BIASES},
    window=WindowByLayer(),
)
