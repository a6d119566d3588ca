"""Qwen3 (Yang et al., 2025): a norm on queries and keys; `attention_bias` also covers the output projection."""

from ..values import WindowByLayer
from .decoder import ALL_ATTENTION_BIASES, ATTENTION, LLAMA, MLP, NORMS, Q_AND_K_NORM, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "qwen3",
    "Qwen3Config",
    "Qwen3ForCausalLM Qwen3Model Qwen3ForSequenceClassification Qwen3ForTokenClassification Qwen3ForQuestionAnswering",
    structure={**LLAMA, "qk_norm": True},
    fresh=rotary(1_000_000.0),
    layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
    qa_root="transformer.",
    fields={"attention_bias": ALL_ATTENTION_BIASES},
    window=WindowByLayer(),
)
