"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values, none on the output projection."""

from .fields import HeadDim, WindowByLayer
from .llama_like import LlamaLikeFamily

FAMILY = LlamaLikeFamily("qwen2", "Qwen2", spans="transformer.", window=WindowByLayer(), head_dim=HeadDim(always=False))
