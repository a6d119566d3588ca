"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values, none on the output projection."""

from .llama_like import QKV_BIAS, DecoderFamily, WindowByLayer

FAMILY = DecoderFamily(
    name="qwen2",
    prefix="Qwen2",
    more=QKV_BIAS,
    settings={"attention_bias": True},
    window=WindowByLayer(),
    head_dim_field=False,
)
