"""ERNIE 4.5 without experts (Baidu, 2025): Llama whose heads turn neighbouring channels, with one switch for biases."""

from .decoder import ALL_BIASES, LLAMA, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "ernie4_5",
    "Ernie4_5Config",
    "Ernie4_5ForCausalLM Ernie4_5Model",
    structure=LLAMA,
    fresh={**rotary(500_000.0), "norm_eps": 1e-5, "tie_word_embeddings": True},
    pairs=True,
    fields={"use_bias": ALL_BIASES, "attention_dropout": None},
)
