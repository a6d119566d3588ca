"""dots.llm1 (Huo et al., 2025): Qwen3's attention, and DeepSeek's experts: sigmoid scores and a term in the choice."""

from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA
from .with_experts import (
    FINE,
    FIRST_DENSE,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    ExpertNames,
    expert_groups,
    shared_experts,
)

FAMILY = Family(
    "dots1",
    "Dots1Config",
    "Dots1ForCausalLM Dots1Model",
    structure={**LLAMA, "qk_norm": True, **SIGMOID_ROUTER},
    fresh={**rotary(10_000_000.0), **FINE, "shared_expert_intermediate_size": 768, "routed_scaling_factor": 2.5},
    names=ExpertNames(sparse=SHARED_EXPERTS),
    settings=DecoderSettings(
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(shared_experts("n_shared_experts"), FIRST_DENSE, expert_groups(2)),
    ),
)
