"""Qwen3 (Yang et al., 2025): a norm on queries and keys; `attention_bias` also covers the output projection."""

from .llama_like import O_BIAS, Q_AND_K_NORM, QKV_BIAS, DecoderFamily, WindowByLayer

FAMILY = DecoderFamily(
    name="qwen3",
    prefix="Qwen3",
    more=(*Q_AND_K_NORM, *QKV_BIAS, *O_BIAS),
    fields={"attention_bias": ("attention_bias", "attention_output_bias")},
    settings={"qk_norm": True},
    window=WindowByLayer(),
)
