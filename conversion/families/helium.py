"""Helium (Kyutai, 2025): Llama whose heads turn neighbouring channels."""

from .llama_like import LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "helium", "Helium", pairs=True, fields={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
)
