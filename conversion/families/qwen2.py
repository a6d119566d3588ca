"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values, none on the output projection."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA

FAMILY = Family(
    "qwen2",
    "Qwen2Config",
    "Qwen2ForCausalLM Qwen2Model Qwen2ForSequenceClassification Qwen2ForTokenClassification Qwen2ForQuestionAnswering",
    structure={**LLAMA, "attention_bias": True},
    fresh=rotary(1_000_000.0),
    names=DecoderNames(),
    settings=DecoderSettings(),
)
