"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values, none on the output projection."""

from .fields import HeadDim, WindowByLayer
from .llama_like import QKV_BIAS, LlamaLikeFamily

FAMILY = LlamaLikeFamily("qwen2", "Qwen2", tensors=QKV_BIAS, window=WindowByLayer(), head_dim=HeadDim(always=False))
