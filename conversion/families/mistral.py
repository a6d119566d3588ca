"""Mistral (Jiang et al., 2023): no biases, one sliding window for every layer."""

from ..values import WindowEverywhere
from .decoder import LLAMA, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "mistral",
    "MistralConfig",
    "MistralForCausalLM MistralModel MistralForSequenceClassification "
    "MistralForTokenClassification MistralForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(10_000.0), "sliding_window": 4096},
    window=WindowEverywhere(),
    qa_root="model.",
)
