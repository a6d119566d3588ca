"""GLM-4.7-Flash (GLM team, 2026): GLM-4.5's experts, and DeepSeek's latent attention.

Checkpoints hold a layer after the last one, which predicts one token more.
"""

from .base import Family
from .decoder import DecoderSettings
from .deepseek import FRESH, LATENT_FIELDS, LATENT_NAMES, SETTINGS
from .shared import LLAMA
from .with_experts import FLOAT32_ROUTER, SHARED_EXPERTS, ExpertNames, expert_groups, shared_experts

FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteConfig",
    "Glm4MoeLiteForCausalLM Glm4MoeLiteModel",
    structure={
        **LLAMA,
        "latent_norm_eps": 1e-6,
        **FLOAT32_ROUTER,
    },
    fresh={
        **FRESH,
        "num_expert_groups": 0,
        "num_expert_groups_per_tok": 0,
        "experts_per_group_score": 0,
        "shared_expert_intermediate_size": 384,
        "q_lora_rank": 192,
        "norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
    },
    names=ExpertNames(sparse=SHARED_EXPERTS, ignored=["layers.{beyond}.*"], **LATENT_NAMES),
    settings=DecoderSettings(
        fields=LATENT_FIELDS,
        unsupported={"rope_interleave": (True,)},
        computed=(shared_experts("n_shared_experts"), expert_groups(2)),
        **SETTINGS,
    ),
)
