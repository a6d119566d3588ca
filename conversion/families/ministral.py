"""Ministral (2024) and CWM (Copet et al., 2025): Llama with windows in some of the layers."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import every, rotary
from .shared import LLAMA

MINISTRAL = Family(
    "ministral",
    "MinistralConfig",
    "MinistralForCausalLM MinistralModel MinistralForSequenceClassification "
    "MinistralForTokenClassification MinistralForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(10_000.0), **every(4, 4096)},
    names=DecoderNames(),
    settings=DecoderSettings(),
)
CWM = Family(
    "cwm",
    "CwmConfig",
    "CwmForCausalLM CwmModel",
    structure=LLAMA,
    fresh={**rotary(1_000_000.0), **every(4, 8192), "norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    names=DecoderNames(),
    settings=DecoderSettings(unsupported={"mlp_bias": (None, False)}),
)
