"""Which fields of a config steer which box of its figure."""

from typing import Any

from ..declared_fields import axes_of, is_idle
from ..model.axes import BLOCKS
from ..pictures.anatomy import Box

# Fields that are numbers of something rather than a way to build: a box that differs only in them is not another box.
SIZES = frozenset(
    "vocab_size decoder_vocab_size hidden_size embedding_size token_embedding_size num_hidden_layers decoder_layers "
    "intermediate_size decoder_intermediate_size max_position_embeddings num_attention_heads head_dim type_vocab_size "
    "final_projection_size "
    "task_type_vocab_size num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size "
    "moe_latent_size linear_group_size norm_eps intermediate_sizes hidden_size_per_layer_input num_shared_kv_layers "
    "position_offset num_hidden_groups sliding_window layer_types decoder_layer_types mlp_layer_types rope_layers "
    "mlp_layers num_key_value_heads pruned_heads kv_lora_rank q_lora_rank v_head_dim num_expert_groups".split()
)
_GROUPS = {
    "norm": ("norm",),
    "attention": ("attention", "weights"),
    "feed-forward": ("feed-forward", "weights"),
    "positions": ("positions",),
}
_PLACED = {
    "embed_tokens": "vocab_size decoder_vocab_size embedding_size token_embedding_size hidden_size embedding_scale "
    "scales_in_embedding unscaled_token_id share_embeddings tie_word_embeddings token_dropout token_types_as_tokens "
    "hidden_size_per_layer_input",
    "embed_token_types": "type_vocab_size embedding_size",
    "embed_task_types": "task_type_vocab_size embedding_size",
    "embed_projection": "embedding_size hidden_size",
    "token_projection": "token_embedding_size hidden_size",
    "final_projection": "token_embedding_size final_projection_size hidden_size",
    "token_inputs": "hidden_size_per_layer_input token_input_table vocab_size hidden_size num_hidden_layers",
    "end": "hidden_size_per_layer_input layer_scale hidden_size hidden_act",
    "embedding_norm": "embedding_norm",
    "attention": "hidden_size position_type num_hidden_layers decoder_layers num_hidden_groups",
    "feed-forward": "hidden_size intermediate_size decoder_intermediate_size residual",
    "residual": "residual residual_multiplier norm_placement hidden_dropout",
    "positions": "position_type max_position_embeddings",
    "norm": "hidden_size decoder_norm_placement",
    "head": "hidden_size token_embedding_size final_projection_size",
    "lm_head": "tie_word_embeddings lm_head_bias logit_scale final_logit_softcapping vocab_size decoder_vocab_size "
    "num_nextn_predict_layers nextn_layer nextn_final_norm",
    "lm_head_transform": "lm_head_transform head_transform_bias hidden_act",
    "classifier_transform": "classifier_transform head_transform_bias hidden_act",
    "pooler": "pooler_act pooling",
    "score": "pooling",
}
_NORMS_ALONE = ("norm_type", "norm_eps", "norm_weight", "norm_bias")


def fields_of(box: Box, config) -> dict[str, Any]:
    """The fields that steer a box, with their values in a config."""
    known = axes_of(config)
    attribute = box.role.rpartition(".")[2]
    names = [name for key in (attribute, box.kind) for name in _PLACED.get(key, "").split()]
    if attribute == "embedding_norm":
        names += _NORMS_ALONE
    elif attribute == "end":
        names = _PLACED[attribute].split()
    else:
        names += [name for name, axis in known.items() if axis.group in _GROUPS.get(box.kind, ())]
        names += BLOCKS["residual"][config.residual].fields if box.kind == "residual" else ()
    names = [name for name in dict.fromkeys(names) if name in known and not _is_idle(name, box, config)]
    return {name: getattr(config, name) for name in names}


def _is_idle(name: str, box: Box, config) -> bool:
    """Whether a field has no effect on this box, next to the others."""
    in_norm = box.kind == "norm"
    if is_idle(name, vars(config)):
        return True
    if name in ("position_offset", "padding_position"):
        return box.role.endswith("relative_bias")
    if name in ("sliding_window", "layer_types", "decoder_layer_types"):
        return box.mask == "cross"
    if name == "final_norm":
        return in_norm and not box.role.endswith(".norm") and box.role.count(".") > 1
    if in_norm and name in ("norm_placement", "residual", "residual_multiplier", "first_attention_norm"):
        return box.role.count(".") < 2
    return False


def plain(value: Any) -> str:
    """A field's value in a few letters, long lists folded."""
    if isinstance(value, list) and len(value) > 4 and all(isinstance(one, str | bool) for one in value):
        kinds = sorted({str(one) for one in value})
        return ", ".join(f"{[str(one) for one in value].count(kind)} x {kind}" for kind in kinds)
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    words = f"{value:.6g}" if isinstance(value, float) else str(value)
    return words if len(words) < 300 else words[:297] + "..."
