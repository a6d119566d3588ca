"""Apertus (Swiss AI Initiative, 2025): no gate in the network, and an activation with trained numbers.

It is xIELU (Huang and Schlag, 2024), which has two trained numbers in each layer and two that are fixed.
"""

from ..rules.table import Rule
from .base import Family
from .decoder import DecoderNames
from .fresh import rotary
from .shared import ATTENTION, LLAMA, PLAIN_MLP, Q_AND_K_NORM

NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")


def rules_of_the_activation(config) -> list[Rule]:
    """The rules of a layer's xIELU."""
    names = NUMBERS if config.hidden_act == "xielu" else ()
    return [Rule(f"mlp.act_fn.{name}", f"mlp.act_fn.{name}") for name in names]


FAMILY = Family(
    "apertus",
    "ApertusForCausalLM ApertusModel ApertusForTokenClassification",
    structure={**LLAMA, "gated_mlp": False, "qk_norm": True},
    fresh={**rotary(12_000_000.0), "hidden_act": "xielu", "norm_eps": 1e-5},
    names=DecoderNames(
        layer={
            **ATTENTION,
            **PLAIN_MLP,
            **Q_AND_K_NORM,
            "attention_layernorm": "self_attn_pre_norm",
            "feedforward_layernorm": "mlp_pre_norm",
        },
        more_rules=rules_of_the_activation,
    ),
)
