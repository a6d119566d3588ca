"""InternLM3 (Shanghai AI Laboratory, 2025) and IQuest-Coder (IQuest Lab, 2026): own configs, and Llama's classes."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA

INTERNLM3 = Family(
    "internlm3",
    "InternLM3Config",
    "LlamaForCausalLM LlamaModel",
    structure=LLAMA,
    fresh={**rotary(50_000_000.0), "norm_eps": 1e-5},
    names=DecoderNames(former_classes={"InternLM3ForCausalLM": "LlamaForCausalLM", "InternLM3Model": "LlamaModel"}),
    settings=DecoderSettings(),
)
IQUESTCODER = Family(
    "iquestcoder",
    "IQuestCoderConfig",
    "LlamaForCausalLM LlamaModel",
    structure=LLAMA,
    fresh={**rotary(500_000.0), "norm_eps": 1e-5},
    names=DecoderNames(former_classes={"IQuestCoderForCausalLM": "LlamaForCausalLM", "IQuestCoderModel": "LlamaModel"}),
    settings=DecoderSettings(unsupported={"clip_qkv": (None,), "use_sliding_window": (None, False)}),
)
