"""Helium (Kyutai, 2025): Llama whose heads turn neighbouring channels."""

from .base import Family
from .decoder import LLAMA, DecoderNames, DecoderSettings
from .decoder_heads import decoder_heads
from .fresh import rotary

FAMILY = Family(
    "helium",
    "HeliumConfig",
    decoder_heads("HeliumForCausalLM HeliumModel HeliumForSequenceClassification HeliumForTokenClassification"),
    structure=LLAMA,
    fresh={**rotary(100_000.0), "norm_eps": 1e-8},
    names=DecoderNames(pairs=True),
    settings=DecoderSettings(fields={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}),
)
