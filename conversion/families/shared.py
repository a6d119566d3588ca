"""What many decoders share: the names of their modules and fields, and structures."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from ..rules.table import Rule
from ..values import Computed

Modules = Mapping[str, str | tuple[str, ...]]
LAYER = "layers.{layer}."
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = {name: name for name in (*QKV, "self_attn.o_proj")}
MLP = {name: name for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
NORMS = {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
"""Official norm of a layer -> ours."""
OUTPUT_NORMS = {"post_attention_layernorm": "self_attn_output_norm", "post_feedforward_layernorm": "mlp_output_norm"}
FOUR_NORMS = {
    "input_layernorm": "self_attn_pre_norm",
    "post_attention_layernorm": "self_attn_output_norm",
    "pre_feedforward_layernorm": "mlp_pre_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
PLAIN_MLP = {name: name for name in ("mlp.up_proj", "mlp.down_proj")}
"""Without a gate."""
Q_AND_K_NORM = {name: name for name in ("self_attn.q_norm", "self_attn.k_norm")}
FUSED_MLP: Modules = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj": "mlp.down_proj"}


def usual_layer(structure: Mapping[str, Any]) -> Modules:
    """The modules of a layer with Llama's names, by the settings that all models of a family have."""
    norms = {"output": OUTPUT_NORMS, "pre_output": FOUR_NORMS}.get(structure.get("norm_placement", ""), NORMS)
    of_heads = Q_AND_K_NORM if structure.get("qk_norm") else {}
    return {**ATTENTION, **(MLP if structure.get("gated_mlp", True) else PLAIN_MLP), **of_heads, **norms}


OUTER = {"embed_tokens": "embed_tokens", "norm": "norm"}
"""Official module outside of the layers -> ours."""
Fields = Mapping[str, str | tuple[str, ...]]
ALL_ATTENTION_BIASES = ("attention_bias", "attention_output_bias")
"""What the official `attention_bias` of most families sets."""
FIELDS: Fields = {
    **{
        theirs: ours
        for ours, names in {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size d_model n_embd",
            "intermediate_size": "intermediate_size ffn_dim",
            "num_hidden_layers": "num_hidden_layers num_layers n_layers n_layer",
            "num_attention_heads": "num_attention_heads num_heads n_heads n_head",
            "num_key_value_heads": "num_key_value_heads",
            "hidden_act": "hidden_act hidden_activation activation_function activation mlp_hidden_act",
            "max_position_embeddings": "max_position_embeddings n_positions max_seq_len",
            "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
            "initializer_range": "initializer_range init_std",
            "use_cache": "use_cache",
            "tie_word_embeddings": "tie_word_embeddings",
            "mlp_bias": "mlp_bias",
            "attention_dropout": "attention_dropout attention_probs_dropout_prob attn_pdrop",
            "hidden_dropout": "hidden_dropout hidden_dropout_prob dropout residual_dropout embedding_dropout "
            "resid_dropout embed_dropout resid_pdrop embd_pdrop",
            "activation_dropout": "activation_dropout",
            "pad_token_id": "pad_token_id",
            "bos_token_id": "bos_token_id",
            "eos_token_id": "eos_token_id",
        }.items()
        for theirs in names.split()
    },
    "attention_bias": ALL_ATTENTION_BIASES,
}
"""Official field -> ours, wherever an official class has it and a family says nothing else."""
EXPERT_FIELDS: Fields = {
    **{
        name: name
        for name in (
            "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size mlp_layer_types "
            "norm_topk_prob routed_scaling_factor output_router_logits router_aux_loss_coef"
        ).split()
    },
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "shared_intermediate_size": "shared_expert_intermediate_size",
}
"""The same of decoders with experts."""


def fields_without(*names: str) -> Fields:
    """`FIELDS` without these, which an official class has and does not follow, or means otherwise."""
    return {theirs: ours for theirs, ours in FIELDS.items() if theirs not in names}


ALL_BIASES = (*ALL_ATTENTION_BIASES, "mlp_bias")

LLAMA = {"norm_type": "rms_norm", "norm_placement": "pre", "position_type": "rotary", "gated_mlp": True}
"""The structure of decoders after Llama."""
BIASES = dict.fromkeys(ALL_BIASES, True)
GPT = {"norm_type": "layer_norm", "norm_placement": "pre", "gated_mlp": False, **BIASES}
"""The structure of decoders after GPT."""
ROTARY_GPT = {**GPT, "position_type": "rotary"}
TYPED = {"token_types_as_tokens": True}
"""Of GPT-2 and its kin, whose official classes embed token types as tokens."""
READ_TYPED = Computed(lambda official: TYPED)


def sinks(config: PretrainedConfig) -> list[Rule]:
    """The rule of a layer whose heads have sinks."""
    return [Rule("self_attn.sinks", "self_attn.sinks")]
