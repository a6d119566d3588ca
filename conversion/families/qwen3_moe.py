"""Qwen3-MoE (Yang et al., 2025): Qwen3 with experts."""

from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA
from .with_experts import FINE, SPARSE_STEP, ExpertNames

FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM Qwen3MoeModel Qwen3MoeForSequenceClassification "
    "Qwen3MoeForTokenClassification Qwen3MoeForQuestionAnswering",
    structure={**LLAMA, "qk_norm": True},
    fresh={**rotary(1_000_000.0), **FINE},
    names=ExpertNames(),
    settings=DecoderSettings(
        fields={"num_experts": "num_experts"},
        computed=(SPARSE_STEP,),
    ),
)
