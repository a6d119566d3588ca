"""Sarvam 30B and 105B (Sarvam AI, 2026): configs of their own on the classes of GLM-4.5 and of DeepSeek-V3.

Files of the smaller model have names of its own code, and queries, keys and values in one matrix.
"""

from typing import Any

from ..rules.operations import Split
from ..rules.table import module_rules
from ..storage.spelling import Parts
from ..values import Flag, Rope
from .base import Family
from .decoder import DecoderSettings
from .deepseek import FRESH, LATENT_FIELDS, LATENT_NAMES, SETTINGS
from .fresh import rotary
from .shared import ATTENTION, LLAMA, MLP, NORMS, Q_AND_K_NORM, QKV
from .with_experts import (
    FINE,
    FIRST_DENSE,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    ExpertNames,
    expert_groups,
    shared_experts,
)

IN_FILES = Parts(
    {
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.": ".self_attn.",
        ".self_attn.dense.": ".self_attn.o_proj.",
        ".self_attn.query_layernorm.": ".self_attn.q_norm.",
        ".self_attn.key_layernorm.": ".self_attn.k_norm.",
        ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
    }
)


def fused(config):
    """Queries, keys and values one after the other."""
    heads, groups = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    return module_rules({"self_attn.query_key_value": QKV}, Split(0, (heads, groups, groups)))


EXPERTS: tuple[Any, ...] = (shared_experts("n_shared_experts"), FIRST_DENSE, expert_groups(2))
MOE = Family(
    "sarvam_moe",
    "Glm4MoeForCausalLM Glm4MoeModel",
    config_class="SarvamMoEConfig",
    structure={**LLAMA, **SIGMOID_ROUTER},
    fresh={
        **rotary(8_000_000.0),
        **FINE,
        "shared_expert_intermediate_size": 384,
        "qk_norm": True,
        "routed_scaling_factor": 2.5,
    },
    names=ExpertNames(
        layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
        sparse=SHARED_EXPERTS,
        spellings=[IN_FILES],
        in_files=fused,
        former_classes={"SarvamMoEForCausalLM": "Glm4MoeForCausalLM", "SarvamMoEModel": "Glm4MoeModel"},
    ),
    settings=DecoderSettings(
        fields={"attention_bias": "attention_bias"},
        rope=Rope(by_part=True),
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=(*EXPERTS, Flag("use_qk_norm", "qk_norm", (False, True))),
    ),
)
MLA = Family(
    "sarvam_mla",
    "DeepseekV3ForCausalLM DeepseekV3Model",
    config_class="SarvamMLAConfig",
    structure={**LLAMA, "latent_norm_eps": 1e-6, **SIGMOID_ROUTER},
    fresh={
        **FRESH,
        "num_expert_groups": 0,
        "num_expert_groups_per_tok": 0,
        "experts_per_group_score": 0,
        "shared_expert_intermediate_size": 384,
        "routed_scaling_factor": 2.5,
    },
    names=ExpertNames(
        sparse=SHARED_EXPERTS,
        former_classes={"SarvamMLAForCausalLM": "DeepseekV3ForCausalLM", "SarvamMLAModel": "DeepseekV3Model"},
        **LATENT_NAMES,
    ),
    settings=DecoderSettings(
        fields=LATENT_FIELDS, unsupported={"rope_interleave": (True,)}, computed=EXPERTS, **SETTINGS
    ),
)
