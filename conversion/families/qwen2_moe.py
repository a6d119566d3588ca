"""Qwen2-MoE (Qwen team, 2024): experts in addition to one for every token, whose output has a learned factor."""

from .base import Family
from .decoder import DecoderSettings
from .decoder_heads import decoder_heads
from .fresh import rotary
from .shared import LLAMA
from .with_experts import FINE, SHARED, SPARSE_STEP, ExpertNames

FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeConfig",
    decoder_heads(
        "Qwen2MoeForCausalLM Qwen2MoeModel Qwen2MoeForSequenceClassification "
        "Qwen2MoeForTokenClassification Qwen2MoeForQuestionAnswering",
        qa_root="model.",
    ),
    structure={**LLAMA, "attention_bias": True, "shared_expert_gate": True},
    fresh={**rotary(1_000_000.0), **FINE, "shared_expert_intermediate_size": 1536, "norm_topk_prob": False},
    names=ExpertNames(sparse={**SHARED, "shared_expert_gate": "shared_expert_gate"}),
    settings=DecoderSettings(
        fields={"qkv_bias": "attention_bias"},
        computed=(SPARSE_STEP,),
    ),
)
