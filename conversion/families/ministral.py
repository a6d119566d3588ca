"""Ministral (2024) and CWM (Copet et al., 2025): Llama with windows in some of the layers."""

from ..values import WindowByLayer
from .decoder import LLAMA, DecoderFamily
from .fresh import every, rotary

MINISTRAL = DecoderFamily(
    "ministral",
    "MinistralConfig",
    "MinistralForCausalLM MinistralModel MinistralForSequenceClassification "
    "MinistralForTokenClassification MinistralForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(10_000.0), **every(4, 4096)},
    qa_root="transformer.",
    window=WindowByLayer(by_flag=False),
)
CWM = DecoderFamily(
    "cwm",
    "CwmConfig",
    "CwmForCausalLM CwmModel",
    structure=LLAMA,
    fresh={**rotary(1_000_000.0), **every(4, 8192), "norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    window=WindowByLayer(by_flag=False),
    unsupported={"mlp_bias": (None, False)},
)
