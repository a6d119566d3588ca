"""OLMo Hybrid (OLMo team, 2026): OLMo 3 in which three layers of four keep a state, with their norms before sub-layers.

Released checkpoints have no positions: states know the order. Their norms and convolutions have other names than in
the official class, and what the class writes differs from both.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from ..rules.operations import Reversed, Split
from ..rules.table import Rule, module_rules
from ..storage.spelling import Alternative
from ..values import Rope, StatesByLayer
from ..values.states import SIZES
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import few_full, rotary
from .olmo import STRUCTURE
from .qwen3_next import sizes_of
from .shared import ATTENTION, MLP, NORMS, OUTPUT_NORMS, Q_AND_K_NORM

PUBLISHED = "as published"
"""A trait: layers with keys call their norms as the class does, and the convolution is cut into queries, keys, values.

`save_pretrained` of the class writes other names there, and cuts the convolution into equal parts.
"""
STATE = "linear_attention"
OF_STATES = {
    **{f"{letter}_proj": f"in_proj_{letter}" for letter in "qkvab"},
    "g_proj": "in_proj_z",
    "o_norm": "norm",
    "o_proj": "out_proj",
}
"""Official module of a layer with a state -> ours."""
SAME = ("A_log", "dt_bias", "conv1d.weight")
IN_FILES = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""A norm in the class -> in files."""


class RopeOrNone(Rope):
    """Rotary parameters, or no positions where theta is missing."""

    def read(self, official):
        if (official.config.rope_parameters or {}).get("rope_theta") is None:
            return {"position_type": "none", "rope_parameters": None}
        return super().read(official)

    def write(self, config, head):
        if config.position_type == "none":
            return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        return super().write(config, head)


@dataclass(kw_only=True, eq=False)
class HybridNames(DecoderNames):
    """The names of a decoder whose layers have norms of one name in other places, by their type."""

    def alternatives(self, head):
        published = Alternative(PUBLISHED, ends=(".post_attention_layernorm.weight",))
        return [*super().alternatives(head), [published]]

    def storage(self, variant, config):
        root, (keys, values, _) = self.head(variant).root, sizes_of(config)
        is_published, whole = PUBLISHED in variant.traits, 2 * keys + values
        third = -(-whole // 3)
        sizes = (keys, keys, values) if is_published else (third, third, whole - 2 * third)
        rules = []
        for index, kind in enumerate(config.layer_types):
            layer = f"{root}layers.{index}."
            if kind == STATE or not is_published:
                rules += module_rules({layer + theirs: layer + name for name, theirs in IN_FILES.items()})
            parts = tuple(f"{layer}linear_attn.{letter}_conv1d.weight" for letter in "qkv")
            rules.append(Rule(parts, f"{layer}linear_attn.conv1d.weight", Reversed(Split(0, sizes))))
        return rules

    def stack_rules(self, config: PretrainedConfig):
        rules = super().stack_rules(config)
        for index, kind in enumerate(config.layer_types):
            layer = f"layers.{index}."
            norms = NORMS if kind == STATE else OUTPUT_NORMS
            rules += module_rules({layer + theirs: layer + ours for theirs, ours in norms.items()})
        return rules


def rules_of_states(config: PretrainedConfig) -> list[Rule]:
    """The rules of a layer with a state, without its prefix."""
    modules = {f"linear_attn.{theirs}": f"self_attn.{ours}" for theirs, ours in OF_STATES.items()}
    return [*module_rules(modules), *(Rule(f"linear_attn.{name}", f"self_attn.{name}") for name in SAME)]


FAMILY = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM OlmoHybridModel",
    structure={**STRUCTURE, "linear_norm_placement": "pre", "linear_norm_eps": 1e-5},
    fresh={
        **rotary(500_000.0),
        "position_type": "none",
        "rope_parameters": None,
        "layer_types": few_full(4, STATE),
        "linear_allow_neg_eigval": True,
    },
    names=HybridNames(layer={**ATTENTION, **MLP, **Q_AND_K_NORM}, more_rules=rules_of_states, outside=["mtp.*"]),
    settings=DecoderSettings(
        rope=RopeOrNone(),
        window=StatesByLayer(names=(*SIZES, "linear_allow_neg_eigval")),
        reads_whole=False,
    ),
)
