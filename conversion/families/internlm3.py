"""InternLM3 (Shanghai AI Laboratory, 2025) and IQuest-Coder (IQuest Lab, 2026): own configs, and Llama's classes."""

from typing import Any

from .decoder import ALL_ATTENTION_BIASES, LLAMA, DecoderFamily
from .fresh import rotary

SETTINGS: dict[str, Any] = {
    "structure": LLAMA,
    "fields": {"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
}
INTERNLM3 = DecoderFamily(
    "internlm3",
    "InternLM3Config",
    "LlamaForCausalLM LlamaModel",
    fresh={**rotary(50_000_000.0), "norm_eps": 1e-5},
    former_names={"InternLM3ForCausalLM": "LlamaForCausalLM", "InternLM3Model": "LlamaModel"},
    **SETTINGS,
)
IQUESTCODER = DecoderFamily(
    "iquestcoder",
    "IQuestCoderConfig",
    "LlamaForCausalLM LlamaModel",
    fresh={**rotary(500_000.0), "norm_eps": 1e-5},
    former_names={"IQuestCoderForCausalLM": "LlamaForCausalLM", "IQuestCoderModel": "LlamaModel"},
    unsupported={"clip_qkv": (None,), "use_sliding_window": (None, False)},
    **SETTINGS,
)
