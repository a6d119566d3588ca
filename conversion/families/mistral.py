"""Mistral (Jiang et al., 2023): no biases, one sliding window for every layer."""

from .fields import WindowEverywhere
from .llama_like import LlamaLikeFamily

FAMILY = LlamaLikeFamily("mistral", "Mistral", window=WindowEverywhere(), spans="model.")
