"""Helium (Kyutai, 2025): Llama whose heads turn neighbouring channels."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA

FAMILY = Family(
    "helium",
    "HeliumConfig",
    "HeliumForCausalLM HeliumModel HeliumForSequenceClassification HeliumForTokenClassification",
    structure=LLAMA,
    fresh={**rotary(100_000.0), "norm_eps": 1e-8},
    names=DecoderNames(pairs=True),
    settings=DecoderSettings(fields={"attention_bias": "attention_bias"}),
)
