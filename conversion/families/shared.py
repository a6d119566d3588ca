"""What many decoders share: the names of their modules and fields, and structures."""

from collections.abc import Mapping

from transformers import PretrainedConfig

from ..rules.table import Rule

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
OUTER = {"embed_tokens": "embed_tokens", "norm": "norm"}
"""Official module outside of the layers -> ours."""
Fields = dict[str, str | tuple[str, ...]]
FIELDS: Fields = {
    **{
        name: name
        for name in (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "hidden_act max_position_embeddings initializer_range use_cache tie_word_embeddings attention_dropout "
            "pad_token_id bos_token_id eos_token_id"
        ).split()
    },
    "rms_norm_eps": "norm_eps",
}
"""Official field -> ours, in Llama and most others."""


def fields_without(*names: str) -> Fields:
    """`FIELDS` without these, which an official class lacks or calls otherwise."""
    return {theirs: ours for theirs, ours in FIELDS.items() if theirs not in names}


LAYER_NORM_FIELDS: Fields = {**fields_without("rms_norm_eps"), "layer_norm_eps": "norm_eps"}
"""The same of a class with layer norms."""
ALL_ATTENTION_BIASES = ("attention_bias", "attention_output_bias")
"""What the official `attention_bias` of some families sets."""
ALL_BIASES = (*ALL_ATTENTION_BIASES, "mlp_bias")

LLAMA = {"norm_type": "rms_norm", "norm_placement": "pre", "position_type": "rotary", "gated_mlp": True}
"""The structure of decoders after Llama."""
BIASES = dict.fromkeys(ALL_BIASES, True)
GPT = {"norm_type": "layer_norm", "norm_placement": "pre", "gated_mlp": False, **BIASES}
"""The structure of decoders after GPT."""
ROTARY_GPT = {**GPT, "position_type": "rotary"}


def sinks(config: PretrainedConfig) -> list[Rule]:
    """The rule of a layer whose heads have sinks."""
    return [Rule("self_attn.sinks", "self_attn.sinks")]
