"""Helium (Kyutai, 2025): Llama whose heads turn neighbouring channels."""

from .decoder import LLAMA, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "helium",
    "HeliumConfig",
    "HeliumForCausalLM HeliumModel HeliumForSequenceClassification HeliumForTokenClassification",
    structure=LLAMA,
    fresh={**rotary(100_000.0), "norm_eps": 1e-8},
    pairs=True,
    fields={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
