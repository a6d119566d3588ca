"""Mistral (Jiang et al., 2023): no biases, one sliding window for every layer."""

from .llama_like import DecoderFamily, WindowEverywhere

FAMILY = DecoderFamily(name="mistral", prefix="Mistral", window=WindowEverywhere(), span_root="model.")
