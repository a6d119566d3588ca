"""The words of a figure: the text in a box about a model's settings."""

from collections.abc import Sequence
from typing import Any

from ..declared_fields import from_outside
from ..model.axes import BLOCKS
from ..model.positions import RELATIVE_BIAS, SINUSOIDAL
from .canvas import TIMES

_POSITIONS = {
    "rotary": "Rotary positions",
    **dict.fromkeys(RELATIVE_BIAS, "Relative bias"),
    "alibi": "ALiBi slopes",
    "disentangled": "Distance vectors",
}
_HEADS = {
    "lm_head": "Language model head",
    "lm_head_transform": "Dense, activation, norm",
    "classifier_transform": "Dense, activation, norm",
    "pooler": "Pooler",
    "score": "Classifier",
    "next_sentence_score": "Next-sentence score",
    "dense": "Dense and activation",
    "qa_outputs": "Start and end scores",
}


def norm_title(config, place: str = "") -> str:
    """The kind of norm, with its factor where that is not the usual one, after a word for its place."""
    if config.norm_type in BLOCKS["norm_type"]:
        return f"{place}{own_title(config.norm_type)}"
    name = place + ("RMS norm" if config.norm_type == "rms_norm" else "layer norm" if place else "Layer norm")
    return name + {"plain": "", "zero_centered": ", 1 + weight", "none": ", no weight"}[config.norm_weight]


def own_title(value: str) -> str:
    """What a block from outside is called, by its value."""
    return value.replace("_", " ").capitalize()


def _own_layers() -> list[str]:
    """The layer types from outside."""
    return [block.value for block in from_outside() if block.axis == "layer_types"]


def added_title(config) -> str:
    """The name of what is added to the embeddings for their order."""
    kind = config.position_type
    if kind in BLOCKS["position_type"]:
        return own_title(kind)
    return "Sinusoids" if kind in SINUSOIDAL else "Learned positions"


def attended_title(config) -> str:
    """The name of the positions in each attention."""
    kind = config.position_type
    return own_title(kind) if kind in BLOCKS["position_type"] else _POSITIONS[kind]


def head_title(name: str) -> str:
    """What stands on the stack is called, by its attribute."""
    return _HEADS.get(name, name.replace("_", " ").capitalize())


def language_model_head_words(config) -> tuple[str, ...]:
    """Specialities of a language model head."""
    chips = [f"{TIMES} {config.logit_scale:.4g}"] if config.logit_scale != 1 else []
    chips += [f"soft cap {config.final_logit_softcapping:g}"] if config.final_logit_softcapping else []
    chips += ["bias"] if config.lm_head_bias else []
    return (*chips, *["tied to the embedding"] * bool(config.tie_word_embeddings))


def attention_words(module: Any, layer: Any) -> tuple[str, tuple[str, ...]]:
    """Sizes and specialities of an attention."""
    config, count = module.config, len(module.heads)
    kinds = count // module.num_key_value_groups
    size = f"{count} heads of {module.head_dim}"
    if kinds < count:
        size += f", {kinds} key/value head{'s' * (kinds > 1)}"
    chips: list[str] = []
    if not module.is_cross_attention:
        own = layer.layer_type if layer.layer_type in _own_layers() else config.attention_type
        chips += [own_title(own).lower()] if own else []
        if config.scheme("vectors") is None and config.position_type in BLOCKS["position_type"]:
            chips.append(own_title(config.position_type).lower())
        elif config.position_type == "rotary":
            chips.append(_rotary(config, layer.layer_type) if layer.rotates else "no positions")
        elif config.position_type in RELATIVE_BIAS:
            chips.append("own relative bias" if module.relative_bias is not None else "+ relative bias")
        elif config.position_type in ("relative_key", "relative_key_query"):
            chips.append("relative keys" + " and queries" * config.position_type.endswith("query"))
        elif config.position_type == "alibi":
            chips.append("slope by distance")
        elif config.position_type == "disentangled":
            chips.append("content · distance")
        elif config.position_type == "none":
            chips.append("no positions")
    if config.kv_lora_rank:
        chips.append(f"latent keys and values, {config.kv_lora_rank:,}")
        chips += [f"latent queries, {config.q_lora_rank:,}"] if config.q_lora_rank else []
    if config.is_varied:
        chips += module.words
    if module.sliding_window:
        chips.append(f"window {config.sliding_window:,}" if module.is_causal else f"window ± {config.sliding_window:,}")
    if config.qk_norm:
        kinds = {"projection": " over all", "per_head": " per head", "rotated": " after the rotation"}
        chips.append(f"q/k norm{kinds.get(config.qk_norm, '')}")
    if config.attention_scale is not None:
        chips.append(f"scores {TIMES} {config.attention_scale:.3g}")
    if config.attn_logit_softcapping:
        chips.append(f"soft cap {config.attn_logit_softcapping:g}")
    if config.clip_qkv:
        chips.append(f"clipped at {config.clip_qkv:g}")
    if module.has_sinks:
        chips.append("sinks")
    if module.has_gate:
        chips.append("sigmoid gate")
    inner, output = config.attention_bias, config.attention_output_bias
    if inner or output:
        chips.append("biases" if inner and output else "q, k, v biases" if inner else "output bias")
    return size, tuple(chips)


def _rotary(config, layer_type: str) -> str:
    rope = config.rope_parameters
    rope = rope if "rope_type" in rope else rope[layer_type]
    share = rope.get("partial_rotary_factor", 1.0)
    words = "rotary" if share == 1 else f"rotary on {share:.0%}"
    words = words if rope["rope_type"] == "default" else f"{words}, {rope['rope_type']}"
    return words if getattr(config, "query_growth", None) is None else f"{words}, queries grow"


def feed_forward_words(module: Any, config) -> tuple[str, tuple[str, ...], tuple[int, int] | None]:
    """Sizes, specialities and experts of a feed-forward network."""
    if hasattr(module, "experts"):
        count, each = config.num_experts, config.num_experts_per_tok
        size = f"{each} of {count} experts, each {config.moe_intermediate_size:,} wide"
        chips = [f"{'gated ' * bool(config.gated_mlp)}{config.hidden_act}"]
        chips += [f"in {config.moe_latent_size:,} numbers a token"] if config.moe_latent_size else []
        if hasattr(module, "dense"):
            chips += [f"dense network {module.dense.up_proj.out_features:,}", "norms of each"]
        if module.shared_expert is not None:
            gated = ", gated" * (module.shared_expert_gate is not None)
            chips.append(f"shared expert {config.shared_expert_intermediate_size:,}{gated}")
        if config.num_expert_groups:
            chips.append(f"from {config.num_expert_groups_per_tok} of {config.num_expert_groups} groups")
        chips += ["sigmoid scores"] * (config.router_score == "sigmoid")
        chips += [] if config.router_margin is None else ["weights among near scores"]
        chips += ["choice bias"] * config.router_selection_bias + ["biases"] * config.expert_bias
        return size, tuple(chips), (count, each)
    if config.mlp_type:
        return f"{config.hidden_size:,} → {config.hidden_size:,}", (own_title(config.mlp_type).lower(),), None
    width, inner = config.hidden_size, module.up_proj.out_features
    chips = [f"{'gated ' * bool(config.gated_mlp)}{config.hidden_act}"]
    if config.mlp_bias:
        chips.append("biases" if config.mlp_bias is True else "output bias")
    return f"{width:,} → {inner:,} → {width:,}", tuple(chips), None


def end_words(module: Any) -> tuple[str, tuple[str, ...]]:
    """Sizes and specialities of a layer's use of a vector of the token."""
    chips = ("stored factor",) * (module.scale is not None)
    if not module.size:
        return "", chips
    width, inner = module.input_gate.in_features, module.size
    return f"{width:,} → {inner:,} → {width:,}", (f"{TIMES} the token's vector", "norm", *chips)


def _network(kind: type) -> str:
    """What a layer's feed-forward network is, of its class."""
    names = {"NoneType": "no network", "SparseFeedForward": "experts", "DenseAndSparse": "dense and experts"}
    return names.get(kind.__name__, "dense")


def kind_titles(config, kinds: Sequence[tuple], names: Sequence[tuple[str, ...]]) -> list[str]:
    """What sets each kind of layers apart: of its type, whether it rotates, network, heads, keys and norms."""
    types = {
        "full_attention": "full attention",
        "sliding_attention": f"window of {config.sliding_window or 0:,} tokens",
        **dict.fromkeys(BLOCKS["layer_types"], "a state"),
        **{kind: own_title(kind).lower() for kind in _own_layers()},
    }
    aspects = [
        [types[kind[0]] for kind in kinds],
        ["rotary" if kind[1] else "no positions" for kind in kinds],
        [_network(kind[2]) for kind in kinds],
        [f"{kind[3]} heads" for kind in kinds],
        ["keys of an earlier layer" if kind[4] else "" for kind in kinds],
        [f"{kind[5]:,} wide" if kind[5] else "" for kind in kinds],
        ["" if "self_attn_pre_norm" in each else "no first norm" for each in names],
    ]
    varying = [aspect for aspect in aspects if len(set(aspect)) > 1]
    return [", ".join(aspect[index] for aspect in varying if aspect[index]) for index in range(len(kinds))]
