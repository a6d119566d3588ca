"""Qwen2-MoE (Qwen team, 2024): experts beside one for every token, whose output has a learned factor."""

from .fields import WindowByLayer
from .with_experts import ROUTER_FIELDS, SHARED, SPARSE_STEP, ExpertsFamily

SIZES = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")

FAMILY = ExpertsFamily(
    "qwen2_moe",
    "Qwen2Moe",
    sparse={**SHARED, "shared_expert_gate": "shared_expert_gate"},
    fields={**ROUTER_FIELDS, **{name: name for name in SIZES}, "qkv_bias": "attention_bias"},
    computed=(SPARSE_STEP,),
    window=WindowByLayer(),
)
