"""Llama (Touvron et al., 2023): `attention_bias` also covers the output projection."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA

FAMILY = Family(
    "llama",
    "LlamaConfig",
    "LlamaForCausalLM LlamaModel LlamaForSequenceClassification LlamaForTokenClassification LlamaForQuestionAnswering",
    structure=LLAMA,
    fresh=rotary(10_000.0),
    names=DecoderNames(former_classes={"LLaMAForCausalLM": "LlamaForCausalLM", "LLaMAModel": "LlamaModel"}),
    settings=DecoderSettings(),
)
