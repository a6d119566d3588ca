"""Ministral (2024) and CWM (Copet et al., 2025): Llama with windows in some of the layers."""

from .fields import WindowByLayer
from .llama_like import LlamaLikeFamily

MINISTRAL = LlamaLikeFamily("ministral", "Ministral", spans="transformer.", window=WindowByLayer(by_flag=False))
CWM = LlamaLikeFamily("cwm", "Cwm", window=WindowByLayer(by_flag=False), unsupported={"mlp_bias": (None, False)})
