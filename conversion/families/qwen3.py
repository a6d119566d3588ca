"""Qwen3 (Yang et al., 2025): a norm on queries and keys; `attention_bias` also covers the output projection."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA

FAMILY = Family(
    "qwen3",
    "Qwen3Config",
    "Qwen3ForCausalLM Qwen3Model Qwen3ForSequenceClassification Qwen3ForTokenClassification Qwen3ForQuestionAnswering",
    structure={**LLAMA, "qk_norm": True},
    fresh=rotary(1_000_000.0),
    names=DecoderNames(),
    settings=DecoderSettings(),
)
