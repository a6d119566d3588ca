"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values, none on the output projection."""

from ..values import HeadDim, WindowByLayer
from .decoder import LLAMA, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "qwen2",
    "Qwen2Config",
    "Qwen2ForCausalLM Qwen2Model Qwen2ForSequenceClassification Qwen2ForTokenClassification Qwen2ForQuestionAnswering",
    structure={**LLAMA, "attention_bias": True},
    fresh=rotary(1_000_000.0),
    qa_root="transformer.",
    window=WindowByLayer(),
    head_dim=HeadDim(always=False),
)
