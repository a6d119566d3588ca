"""Qwen3-Next (Qwen team, 2025) and the text models of Qwen3.5 (2026): three layers of four keep a state.

The fourth has full attention, whose queries and gate lie head by head in one matrix, and turns a quarter of each head.
Qwen3-Next has experts, and so have the larger Qwen3.5, in every layer. Qwen3.5 counts positions along three axes, which
are the same for text.
"""

from typing import Any

from transformers import PretrainedConfig

from ..rules.operations import Split
from ..rules.table import Rule, module_rules
from ..values import Rope, RopeOfText, StatesByLayer
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import few_full, rotary
from .further import LIKE_QWEN, LIKE_QWEN_3_5
from .shared import ATTENTION, LLAMA, MLP, NORMS, Q_AND_K_NORM
from .with_experts import FINE, SHARED, SPARSE_STEP, ExpertNames

STRUCTURE = {**LLAMA, "norm_weight": "zero_centered", "qk_norm": True, "attention_gate": True}
STATE = "linear_attn"
SAME = {f"{STATE}.{theirs}": f"self_attn.{ours}" for theirs, ours in {"norm": "norm", "out_proj": "out_proj"}.items()}
LAYER = {name: ours for name, ours in ATTENTION.items() if name != "self_attn.q_proj"}
LAYER |= {**MLP, **NORMS, **Q_AND_K_NORM, **SAME}
PARTS = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z")


FRESH = {**rotary(10_000_000.0, 0.25), "layer_types": few_full(4, "linear_attention")}


def sizes_of(config: PretrainedConfig) -> tuple[int, int, int]:
    """Rows of all keys and of all values of a layer with a state, and key heads; without any such layer zeros."""
    if "linear_attention" not in config.layer_types:
        return 0, 0, 1
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, config.linear_num_value_heads * config.linear_value_head_dim, config.linear_num_key_heads


def gate_rule(config: PretrainedConfig) -> Rule:
    """Queries with their gate."""
    size, heads = config.num_attention_heads * config.head_dim, config.num_attention_heads
    both = ("self_attn.q_proj.weight", "self_attn.gate_proj.weight")
    return Rule("self_attn.q_proj.weight", both, Split(0, (size, size), heads))


AS_THEY_ARE = [Rule(f"{STATE}.{name}", f"self_attn.{name}") for name in ("A_log", "dt_bias", "conv1d.weight")]
"""The rules of what a layer with a state holds as it is."""


def next_rules(config: PretrainedConfig) -> list[Rule]:
    """Layers of Qwen3-Next, whose projections are two matrices, key head by key head."""
    keys, values, groups = sizes_of(config)
    steps = getattr(config, "linear_num_value_heads", 0)
    of_states = Split(0, (keys, keys, values, values), groups)
    return [
        gate_rule(config),
        *AS_THEY_ARE,
        Rule(f"{STATE}.in_proj_qkvz.weight", tuple(f"self_attn.{name}.weight" for name in PARTS), of_states),
        Rule(
            f"{STATE}.in_proj_ba.weight",
            ("self_attn.in_proj_b.weight", "self_attn.in_proj_a.weight"),
            Split(0, (steps, steps), groups),
        ),
    ]


def state_rules(config: PretrainedConfig) -> list[Rule]:
    """Layers with a state of Qwen3.5, whose queries, keys and values are one matrix."""
    keys, values, _ = sizes_of(config)
    targets = tuple(f"self_attn.{name}.weight" for name in PARTS[:3])
    names = ("in_proj_z", "in_proj_b", "in_proj_a")
    return [
        *AS_THEY_ARE,
        Rule(f"{STATE}.in_proj_qkv.weight", targets, Split(0, (keys, keys, values))),
        *module_rules({f"{STATE}.{name}": f"self_attn.{name}" for name in names}),
    ]


def text_rules(config: PretrainedConfig) -> list[Rule]:
    """Layers of Qwen3.5."""
    return [gate_rule(config), *state_rules(config)]


NAMES: dict[str, Any] = {"layer": LAYER, "outside": ["mtp.*"]}
SETTINGS: dict[str, Any] = {
    "window": StatesByLayer(),
    "unsupported": {"attention_bias": (None, False)},
    "reads_whole": False,
}
SPARSE = {**SHARED, "shared_expert_gate": "shared_expert_gate"}
SPARSE_STRUCTURE = {**STRUCTURE, "shared_expert_gate": True}
SPARSE_FRESH = {**FRESH, **FINE, "shared_expert_intermediate_size": 384}
NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM Qwen3NextModel Qwen3NextForSequenceClassification "
    "Qwen3NextForTokenClassification Qwen3NextForQuestionAnswering",
    structure=SPARSE_STRUCTURE,
    fresh=SPARSE_FRESH,
    names=ExpertNames(sparse=SPARSE, more_rules=next_rules, further=LIKE_QWEN, **NAMES),
    settings=DecoderSettings(rope=Rope(by_part=True), computed=(LIKE_QWEN, SPARSE_STEP), **SETTINGS),
)
TEXT = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM Qwen3_5TextModel Qwen3_5TextForSequenceClassification",
    config_class="Qwen3_5TextConfig",
    structure=STRUCTURE,
    fresh=FRESH,
    names=DecoderNames(more_rules=text_rules, further=LIKE_QWEN_3_5, **NAMES),
    settings=DecoderSettings(
        rope=RopeOfText(by_part=True),
        computed=[LIKE_QWEN_3_5],
        extra_fields=["mtp_num_hidden_layers"],
        **SETTINGS,
    ),
)
MOE_TEXT = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM Qwen3_5MoeTextModel",
    config_class="Qwen3_5MoeTextConfig",
    structure=SPARSE_STRUCTURE,
    fresh=SPARSE_FRESH,
    names=ExpertNames(sparse=SPARSE, more_rules=text_rules, further=LIKE_QWEN_3_5, **NAMES),
    settings=DecoderSettings(
        rope=RopeOfText(by_part=True),
        without_effect=["intermediate_size"],
        computed=[LIKE_QWEN_3_5],
        extra_fields=["mtp_num_hidden_layers"],
        **SETTINGS,
    ),
)
