"""GLM-4.5 and 4.6 (GLM team, 2025): DeepSeek's experts, a part of each head turns, perhaps a norm on queries and keys.

Checkpoints hold a layer after the last one, which predicts one token more.
"""

from ..values import Flag, Rope
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .further import LIKE_DEEPSEEK
from .shared import ATTENTION, LLAMA, MLP, NORMS, Q_AND_K_NORM
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
    "glm4_moe",
    "Glm4MoeConfig",
    "Glm4MoeForCausalLM Glm4MoeModel",
    structure={**LLAMA, **SIGMOID_ROUTER},
    fresh={
        **rotary(1_000_000.0, 0.5),
        **FINE,
        "shared_expert_intermediate_size": 384,
        "attention_bias": True,
        "norm_eps": 1e-5,
    },
    names=ExpertNames(
        layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
        sparse=SHARED_EXPERTS,
        ignored=["layers.{beyond}.*"],
        further=LIKE_DEEPSEEK,
    ),
    settings=DecoderSettings(
        fields={"attention_bias": "attention_bias"},
        rope=Rope(by_part=True),
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(
            shared_experts("n_shared_experts"),
            FIRST_DENSE,
            expert_groups(2),
            Flag("use_qk_norm", "qk_norm", (False, True)),
            LIKE_DEEPSEEK,
        ),
    ),
)
