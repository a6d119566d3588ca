"""Qwen2-MoE (Qwen team, 2024): experts in addition to one for every token, whose output has a learned factor."""

from ..values import WindowByLayer
from .decoder import LLAMA
from .fresh import rotary
from .with_experts import FINE, ROUTER_FIELDS, SHARED, SPARSE_STEP, ExpertsFamily

SIZES = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")

FAMILY = ExpertsFamily(
    "qwen2_moe",
    "Qwen2MoeConfig",
    "Qwen2MoeForCausalLM Qwen2MoeModel Qwen2MoeForSequenceClassification "
    "Qwen2MoeForTokenClassification Qwen2MoeForQuestionAnswering",
    structure={**LLAMA, "attention_bias": True, "shared_expert_gate": True},
    fresh={**rotary(1_000_000.0), **FINE, "shared_expert_intermediate_size": 1536, "norm_topk_prob": False},
    sparse={**SHARED, "shared_expert_gate": "shared_expert_gate"},
    fields={**ROUTER_FIELDS, **{name: name for name in SIZES}, "qkv_bias": "attention_bias"},
    computed=(SPARSE_STEP,),
    window=WindowByLayer(),
)
