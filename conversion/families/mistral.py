"""Mistral (Jiang et al., 2023): no biases, one sliding window for every layer."""

from .decoder import LLAMA, DecoderFamily
from .fields import WindowEverywhere
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
