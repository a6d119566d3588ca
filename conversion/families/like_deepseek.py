"""Decoders with DeepSeek-V3's experts (`deepseek.py`) and the attention of others."""

from ..storage.spelling import Ending
from ..values import Computed, Flag, Rope
from .base import Family
from .decoder import DecoderSettings
from .fresh import every, rotary
from .further import LIKE_DEEPSEEK, LIKE_EXAONE, LIKE_HUNYUAN
from .llama import read_rotating, write_rotating
from .shared import ATTENTION, LLAMA, MLP, NORMS, Q_AND_K_NORM
from .with_experts import (
    FINE,
    FIRST_DENSE,
    FLOAT32_ROUTER,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    ExpertNames,
    expert_groups,
    shared_experts,
)

# dots.llm1 (Huo et al., 2025): Qwen3's attention, and DeepSeek's experts: sigmoid scores and a term in the choice.
DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM Dots1Model",
    structure={**LLAMA, "qk_norm": True, **SIGMOID_ROUTER},
    fresh={**rotary(10_000_000.0), **FINE, "shared_expert_intermediate_size": 768, "routed_scaling_factor": 2.5},
    names=ExpertNames(sparse=SHARED_EXPERTS),
    settings=DecoderSettings(
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(shared_experts("n_shared_experts"), FIRST_DENSE, expert_groups(2)),
    ),
)


# Solar Open (Upstage, 2026): DeepSeek's experts in every layer, and Llama's attention.
SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM SolarOpenModel",
    structure={**LLAMA, **FLOAT32_ROUTER},
    fresh={**rotary(1_000_000.0), **FINE, "shared_expert_intermediate_size": 384, "norm_eps": 1e-5},
    names=ExpertNames(sparse=SHARED_EXPERTS),
    settings=DecoderSettings(
        fields={
            "moe_intermediate_size": ("intermediate_size", "moe_intermediate_size"),
            "attention_bias": "attention_bias",
        },
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(shared_experts("n_shared_experts"), expert_groups(2)),
        unsupported={"use_qk_norm": (None, False), "first_k_dense_replace": (None, 0)},
    ),
)


# GLM-4.5 and 4.6 (GLM team, 2025): DeepSeek's experts, a part of each head turns, perhaps a norm on queries and keys.
# Checkpoints hold a layer after the last one, which predicts one token more.
GLM4_MOE = Family(
    "glm4_moe",
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


# K-EXAONE (LG AI Research, 2025): EXAONE 4 with norms before the sub-layers, and DeepSeek's experts.
# Checkpoints may hold layers that predict further tokens.
EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM ExaoneMoeModel",
    structure={**LLAMA, "qk_norm": True, **FLOAT32_ROUTER},
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
        further=LIKE_EXAONE,
    ),
    settings=DecoderSettings(
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(
            shared_experts("num_shared_experts"),
            expert_groups(2),
            Computed(read_rotating, write_rotating),
            LIKE_EXAONE,
        ),
        extra_fields=["num_nextn_predict_layers"],
    ),
)


# Hunyuan 3 (Tencent, 2026): Qwen3's attention, and DeepSeek's experts without groups.
# Checkpoints hold a layer after the last one, which predicts one token more.
IN_FILES = Ending(
    {
        "mlp.router.gate.weight": "mlp.gate.weight",
        "mlp.expert_bias": "mlp.e_score_correction_bias",
        **{
            f"mlp.shared_mlp.{part}_proj.weight": f"mlp.shared_experts.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
    }
)
"""Names of a sparse layer's tensors in files -> in the class."""


def width_of_the_dense_layers(official):
    """With no shared expert, the official class makes one as wide as a dense layer."""
    return [] if official.get("num_shared_experts", 1) else ["num_shared_experts"]


HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM HYV3Model",
    structure={**LLAMA, "qk_norm": True, **FLOAT32_ROUTER},
    fresh={
        **rotary(11_158_840.0),
        **FINE,
        "shared_expert_intermediate_size": 384,
        "norm_eps": 1e-5,
        "routed_scaling_factor": 2.826,
    },
    names=ExpertNames(
        sparse=SHARED_EXPERTS,
        bias_of_choice="e_score_correction_bias",
        spellings=[IN_FILES],
        ignored=["layers.{beyond}.*"],
        further=LIKE_HUNYUAN,
    ),
    settings=DecoderSettings(
        fields={"router_scaling_factor": "routed_scaling_factor"},
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(shared_experts("num_shared_experts"), LIKE_HUNYUAN),
        extra_fields=["num_nextn_predict_layers"],
        contradictions=width_of_the_dense_layers,
    ),
)
