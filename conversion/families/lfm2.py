"""LFM2 (Liquid AI, 2025), with and without experts: most layers have a gated convolution in place of attention."""

from typing import Any

from ..rules.table import Rule, module_rules
from ..storage.experts import OneByOne
from ..storage.spelling import Parts
from ..values import Computed, StatesByLayer
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import few_full, rotary
from .shared import ATTENTION, LLAMA, fields_without
from .with_experts import FINE, ExpertNames, first_dense

PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
ATTENTIONS = {name: name for name in ATTENTION if name != "self_attn.o_proj"} | {
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "operator_norm": "self_attn_pre_norm",
    "ffn_norm": "mlp_pre_norm",
}
CONVOLUTION = {
    "conv.conv": "self_attn.conv1d",
    "conv.in_proj": "self_attn.in_proj",
    "conv.out_proj": "self_attn.out_proj",
}
IN_FILES = Parts({".feed_forward.": ".mlp."})
"""Names of feed-forward networks, whose experts are found where most families have them."""


def read_width(official) -> dict[str, Any]:
    """The inner width of the feed-forward networks, which the official class may compute from another one."""
    config = official.config
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = 2 * width // 3
        if config.block_ffn_dim_multiplier is not None:
            step = config.block_multiple_of
            width = -(-int(config.block_ffn_dim_multiplier * width) // step) * step
    return {"intermediate_size": width}


def write_width(config, head) -> dict[str, Any]:
    """The way back."""
    return {"intermediate_size": config.intermediate_size, "block_auto_adjust_ff_dim": False}


def convolution(config) -> list[Rule]:
    """The rules of a layer with a convolution."""
    return module_rules(CONVOLUTION)


STRUCTURE = {**LLAMA, "qk_norm": True, "hidden_act": "silu"}
BOTH: dict[str, Any] = {
    "outer": {"embed_tokens": "embed_tokens", "embedding_norm": "norm"},
    "more_rules": convolution,
}
SETTINGS: dict[str, Any] = {
    "window": StatesByLayer("conv", ("conv_L_cache", "conv_bias")),
    "reads_whole": False,
}
FRESH = {**rotary(1_000_000.0), "layer_types": few_full(3, "conv"), "norm_eps": 1e-5, "tie_word_embeddings": True}
FAMILY = Family(
    "lfm2",
    "Lfm2ForCausalLM Lfm2Model",
    structure=STRUCTURE,
    fresh=FRESH,
    names=DecoderNames(
        layer={**ATTENTIONS, **{f"feed_forward.{theirs}": f"mlp.{ours}" for theirs, ours in PARTS.items()}},
        **BOTH,
    ),
    settings=DecoderSettings(
        usual=fields_without("intermediate_size"),
        computed=[Computed(read_width, write_width)],
        **SETTINGS,
    ),
)
MOE = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM Lfm2MoeModel",
    structure={**STRUCTURE, "router_score": "sigmoid"},
    fresh={**FRESH, **FINE, "router_selection_bias": True},
    names=ExpertNames(
        layer={**ATTENTIONS, **{f"mlp.{theirs}": f"mlp.{ours}" for theirs, ours in PARTS.items()}},
        spellings=[IN_FILES],
        published=OneByOne(parts=("w1", "w3", "w2")),
        bias_of_choice="expert_bias",
        **BOTH,
    ),
    settings=DecoderSettings(
        fields={"use_expert_bias": "router_selection_bias"},
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=[first_dense("num_dense_layers")],
        **SETTINGS,
    ),
)
