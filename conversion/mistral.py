"""Mistral (Jiang et al., 2023): no biases, one sliding window for every layer."""

from .decoder import DecoderFamily, WindowEverywhere, decoder_rules

FAMILY = DecoderFamily(name="mistral", prefix="Mistral", rules=decoder_rules(), window=WindowEverywhere())
