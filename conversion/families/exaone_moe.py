"""K-EXAONE (LG AI Research, 2025): EXAONE 4 with norms before the sub-layers, and DeepSeek's experts.

Checkpoints may hold layers that predict further tokens.
"""

from ..storage.spelling import Ending
from ..values import Computed
from .base import Family
from .decoder import DecoderSettings
from .exaone4 import read_rotating, write_rotating
from .fresh import every, rotary
from .shared import LLAMA
from .with_experts import (
    FINE,
    FLOAT32_ROUTER,
    SHARED_EXPERTS,
    ExpertNames,
    expert_groups,
    shared_experts,
)

FAMILY = Family(
    "exaone_moe",
    "ExaoneMoeConfig",
    "ExaoneMoeForCausalLM ExaoneMoeModel",
    structure={
        **LLAMA,
        "qk_norm": True,
        **FLOAT32_ROUTER,
    },
    fresh={
        **rotary(1_000_000.0),
        **every(4, 128),
        **every(4),
        **FINE,
        "shared_expert_intermediate_size": 384,
        "norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
    },
    names=ExpertNames(
        sparse=SHARED_EXPERTS,
        spellings=[Ending({"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"})],
        outside=["mtp.*"],
    ),
    settings=DecoderSettings(
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(shared_experts("num_shared_experts"), expert_groups(2), Computed(read_rotating, write_rotating)),
    ),
)
