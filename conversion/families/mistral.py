"""Mistral (Jiang et al., 2023): no biases, one sliding window for every layer."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .decoder_heads import decoder_heads
from .fresh import rotary
from .shared import LLAMA

FAMILY = Family(
    "mistral",
    "MistralConfig",
    decoder_heads(
        "MistralForCausalLM MistralModel MistralForSequenceClassification "
        "MistralForTokenClassification MistralForQuestionAnswering",
        qa_root="model.",
    ),
    structure=LLAMA,
    fresh={**rotary(10_000.0), "sliding_window": 4096},
    names=DecoderNames(),
    settings=DecoderSettings(),
)
