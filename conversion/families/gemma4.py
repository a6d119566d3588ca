"""The text model of Gemma 4 (Gemma team, 2026).

Layers without a window have heads of another size and, where their keys are their values, of another number. The last
layers may read the keys of the last one before them of their type, and layers may take a vector of the token or have
experts next to their feed-forward network.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError, shown

from ..rules.table import Rule, RuleTable, module_rules
from ..values import Computed, NotExpressible, RopeByLayerType
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import root_of_width
from .gemma import SCALE
from .shared import ATTENTION, FOUR_NORMS, LAYER, LLAMA, MLP, OUTER, Q_AND_K_NORM, fields_without

FULL, SLIDING = "full_attention", "sliding_attention"
OWN = {name: name for name in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")}
"""Modules that layers with shared keys and values lack; some checkpoints hold them there all the same."""
OUTER_INPUTS = {
    "embed_tokens_per_layer": "token_inputs.embed_tokens",
    "per_layer_model_projection": "token_inputs.projection",
    "per_layer_projection_norm": "token_inputs.norm",
}
LAYER_INPUTS = {
    "per_layer_input_gate": "end.input_gate",
    "per_layer_projection": "end.projection",
    "post_per_layer_input_norm": "end.norm",
}
DENSE_NORMS = {"pre_feedforward_layernorm": "mlp_pre_norm", "post_feedforward_layernorm": "mlp_output_norm"}
NORMS = {theirs: ours for theirs, ours in FOUR_NORMS.items() if theirs not in DENSE_NORMS}
DENSE = {**MLP, **DENSE_NORMS}
"""Modules of a layer whose only network is dense."""
BOTH = {
    **{f"mlp.{name}": f"mlp.dense.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    "router.proj": "mlp.gate",
    "pre_feedforward_layernorm": "mlp.dense_pre_norm",
    "post_feedforward_layernorm_1": "mlp.dense_output_norm",
    "pre_feedforward_layernorm_2": "mlp.sparse_pre_norm",
    "post_feedforward_layernorm_2": "mlp.sparse_output_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
"""Modules of a layer that has experts, too."""
BOTH_TENSORS = {
    "router.scale": "mlp.router_norm.weight",
    "router.per_expert_scale": "mlp.gate.expert_scale",
    "experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "experts.down_proj": "mlp.experts.down_proj",
}
HEADS = ("head_dim", "num_key_value_heads")
GLOBAL = dict(zip(HEADS, ("global_head_dim", "num_global_key_value_heads"), strict=True))
"""Field -> the entry of layers without a window."""


def _heads_of(config: PretrainedConfig, kind: str) -> dict[str, int]:
    """The size and number of key/value heads that an official config gives the layers of a type."""
    settings = vars(config)  # newer releases refuse to look these two up where layers differ
    if hasattr(config, "per_layer_config") and "global_head_dim" not in settings:
        try:
            layer = config.per_layer_config[kind]
        except ValueError as error:
            raise ConversionError(f"config.json: per_layer_config gives layers of {kind} different heads") from error
        return {name: getattr(layer, name) for name in HEADS}
    heads = {name: settings[name] for name in HEADS}
    if kind == FULL:
        names = GLOBAL if config.attention_k_eq_v else {"head_dim": GLOBAL["head_dim"]}
        heads |= {name: settings[entry] for name, entry in names.items() if settings.get(entry)}
    return heads


def strange_layers(entries: Mapping[str, Any]) -> list[str]:
    """`per_layer_config` where layers differ in more than their heads."""
    layers = entries.get("per_layer_config") or {}
    settings = layers.values() if isinstance(layers, Mapping) else [layers]
    is_known = all(isinstance(each, Mapping) and {*each} <= {*HEADS} for each in settings)
    return [] if is_known else ["per_layer_config"]


class Heads:
    """The heads by layer type, of layers without a window other ones; and whether their keys are their values.

    Args:
        says_shared: whether the official class has a setting for the latter; without one they never are.
    """

    def __init__(self, says_shared: bool = True):
        self.says_shared = says_shared

    def read(self, official):
        config, by_type = official.config, {}
        usual = _heads_of(config, SLIDING if SLIDING in config.layer_types else FULL)
        found = _heads_of(config, FULL)
        by_type = {name: value for name, value in found.items() if value != usual[name]}
        by_type |= {"keys_as_values": True} if self.says_shared and config.attention_k_eq_v else {}
        return {**usual, "attention_by_type": {FULL: by_type} if by_type else None}

    def write(self, config, head):
        if strange := sorted(set(config.attention_by_type or {}) - {FULL}):
            raise NotExpressible("attention_by_type", f"of {FULL} only", strange[0])
        usual = {name: getattr(config, name) for name in HEADS}
        full = {**usual, **(config.attention_by_type or {}).get(FULL, {})}
        entries = {GLOBAL[name]: full[name] for name in HEADS}
        is_shared = full.get("keys_as_values", False)
        if not self.says_shared:
            if is_shared:
                raise NotExpressible("attention_by_type", "without keys_as_values")
            return {**usual, **entries}
        if not is_shared and full["num_key_value_heads"] != usual["num_key_value_heads"]:
            raise NotExpressible("attention_by_type", "with keys_as_values where num_key_value_heads differs")
        entries |= {} if is_shared else {"num_global_key_value_heads": None}
        return {**usual, **entries, "attention_k_eq_v": is_shared}


def _read_widths(official):
    config = official.config
    width, shared = config.intermediate_size, config.num_kv_shared_layers
    if not (config.use_double_wide_mlp and shared):
        return {"intermediate_sizes": None}
    return {"intermediate_sizes": [width] * (config.num_hidden_layers - shared) + [2 * width] * shared}


WIDTHS = Computed(_read_widths, lambda config, head: {"use_double_wide_mlp": config.intermediate_sizes is not None})


def _read_inputs(official):
    config = official.config
    size, rows = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
    if size and rows != config.vocab_size:
        raise ConversionError(
            f"config.json: vocab_size_per_layer_input is {shown(rows)} and vocab_size {config.vocab_size}; Blockformer "
            "has one vocabulary for both tables, so run this model with transformers"
        )
    return {"hidden_size_per_layer_input": size or None}


def _write_inputs(config, head):
    size = config.hidden_size_per_layer_input or 0
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": config.vocab_size}


INPUTS = Computed(_read_inputs, _write_inputs)


def _read_experts(official):
    config = official.config
    if not config.enable_moe_block:
        return {}
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "mlp_layer_types": ["both"] * config.num_hidden_layers,
    }


def _write_experts(config, head):
    if not config.num_experts:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": config.num_experts,
        "top_k_experts": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
    }


EXPERTS = Computed(_read_experts, _write_experts)


def last_is_full(config, head):
    """The official class takes the last layer for one without a window, whatever `layer_types` says."""
    if config.layer_types[-1] != FULL:
        raise NotExpressible("layer_types", f"{FULL} in the last layer", config.layer_types[-1])
    return {}


@dataclass(kw_only=True, eq=False)
class SharingNames(DecoderNames):
    """The names of a decoder whose last layers reuse the keys and values of earlier ones."""

    def stack_rules(self, config: PretrainedConfig) -> list[Rule]:
        rules = super().stack_rules(config)
        networks = module_rules(BOTH if config.num_experts else DENSE)
        networks += [Rule(theirs, ours) for theirs, ours in BOTH_TENSORS.items()] if config.num_experts else []
        rules += [rule.under(LAYER, LAYER) for rule in networks]
        for layer in range(config.num_hidden_layers - config.num_shared_kv_layers):
            rules += [rule.under(f"layers.{layer}.", f"layers.{layer}.") for rule in module_rules(OWN)]
        return rules

    def layout(self, variant, config):
        """See `Names.layout`. What layers with shared keys hold of others is kept for the way back."""
        table, root = super().layout(variant, config), self.head(variant).root
        layers = range(config.num_hidden_layers - config.num_shared_kv_layers, config.num_hidden_layers)
        unread = [f"{root}layers.{layer}.{rule.source}" for layer in layers for rule in module_rules(OWN)]
        return RuleTable(table.rules, [*table.ignored, *unread], table.layers)


def full_last(settings: dict) -> list[str]:
    """The layers of a fresh model: each sixth one sees everything, and the last one."""
    count = settings["num_hidden_layers"]
    kinds = [SLIDING if layer % 6 and layer < count else FULL for layer in range(1, count + 1)]
    return kinds if settings["sliding_window"] else [FULL] * count


def _types(settings: dict) -> list[str]:
    given = settings["layer_types"]
    return given(settings) if callable(given) else given or full_last(settings)


def by_type(settings: dict) -> dict | None:
    """The heads of a fresh model's layers without a window: twice as large."""
    size = settings["head_dim"] or settings["hidden_size"] // settings["num_attention_heads"]
    return {FULL: {"head_dim": 2 * size}} if {FULL, SLIDING} == {*_types(settings)} else None


def rope_by_type(settings: dict) -> dict:
    """Rotary parameters of each layer type that there is."""
    rope = {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return {kind: rope[kind] for kind in sorted({*_types(settings)})}


def a_third(settings: dict) -> int:
    """How many of a fresh model's last layers share keys: a third, or as many as leave one of each type before them."""
    types = _types(settings)
    return next(n for n in range(len(types) // 3, -1, -1) if {*types} == {*types[: len(types) - n]})


def an_eighth(settings: dict) -> int:
    """The width of the vectors that a fresh model's layers take."""
    return max(settings["hidden_size"] // 8, 1)


STRUCTURE = {
    **LLAMA,
    "norm_placement": "pre_output",
    "qk_norm": True,
    "value_norm": True,
    "attention_scale": 1.0,
    "layer_scale": True,
}
FRESH: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "embedding_scale": root_of_width,
    "tie_word_embeddings": True,
    "layer_types": full_last,
    "rope_parameters": rope_by_type,
    "attention_by_type": by_type,
}
WIDE_ATTENTION = {name: name for name in ("self_attn.q_proj", "self_attn.o_proj", "self_attn.q_norm")}


def settings_with(*computed: Computed) -> DecoderSettings:
    """The settings of both families, with these values beyond the ones that they share."""
    return DecoderSettings(
        usual=fields_without("num_key_value_heads"),
        fields={
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "num_shared_kv_layers",
        },
        head_dim=Heads(),
        rope=RopeByLayerType(),
        computed=[SCALE, WIDTHS, *computed, Computed(writer=last_is_full)],
        unsupported={"use_bidirectional_attention": (None, False, "vision")},
        contradictions=strange_layers,
        extra_fields=["per_layer_config", *GLOBAL.values()],
        reads_whole=False,
    )


GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM Gemma4TextModel",
    config_class="Gemma4TextConfig",
    structure=STRUCTURE,
    fresh={
        **FRESH,
        "sliding_window": 512,
        "num_shared_kv_layers": a_third,
        "hidden_size_per_layer_input": an_eighth,
    },
    names=SharingNames(
        layer={**WIDE_ATTENTION, **NORMS, **LAYER_INPUTS},
        outer={**OUTER, **OUTER_INPUTS},
        more_rules=lambda config: [Rule("layer_scalar", "end.scale")],
    ),
    settings=settings_with(INPUTS, EXPERTS),
    scales_in_embedding="rounded",
)


# The text model of Gemma 4 12B (Gemma team, 2026): the same without vectors of tokens and without experts.
UNIFIED = Family(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM Gemma4UnifiedTextModel",
    config_class="Gemma4UnifiedTextConfig",
    structure=STRUCTURE,
    fresh={**FRESH, "sliding_window": 1024},
    names=SharingNames(
        layer={**WIDE_ATTENTION, **NORMS}, more_rules=lambda config: [Rule("layer_scalar", "end.scale")]
    ),
    settings=settings_with(),
    scales_in_embedding="rounded",
)


# The text model of EmbeddingGemma 2 (Gemma team, 2026): layers of Gemma 4 that see a whole text.
# Its layers take a projection of the first layer's input, and no vector of the token. Its window is a number of tokens
# to each side. It ends in a projection of the states.
EMBEDDING = Family(
    "embedding_gemma2_text",
    "EmbeddingGemma2TextModel",
    structure={**STRUCTURE, "bidirectional": True, "token_input_table": False},
    names=DecoderNames(
        layer={
            **ATTENTION,
            **Q_AND_K_NORM,
            **MLP,
            **FOUR_NORMS,
            **{f"ple_block.{theirs}": ours for theirs, ours in LAYER_INPUTS.items()},
        },
        outer={
            **OUTER,
            "ple.per_layer_model_projection": "token_inputs.projection",
            "ple.per_layer_projection_norm": "token_inputs.norm",
            "embedding_projection": "final_projection",
        },
        more_rules=lambda config: [Rule("layer_scalar", "end.scale")],
    ),
    settings=DecoderSettings(
        usual=fields_without("num_key_value_heads", "tie_word_embeddings"),
        fields={
            "hidden_size_per_layer_input": "hidden_size_per_layer_input",
            "embedding_dim": "final_projection_size",
        },
        head_dim=Heads(says_shared=False),
        rope=RopeByLayerType(),
        computed=[SCALE, Computed(writer=last_is_full)],
        not_none=["hidden_size_per_layer_input", "final_projection_size"],
        contradictions=strange_layers,
        extra_fields=["per_layer_config", "global_head_dim", "num_global_key_value_heads"],
        reads_whole=False,
    ),
    scales_in_embedding="rounded",
)
