"""Command R (Cohere, 2024) and Command R7B and A (2025): parallel sub-layers that share a layer norm without a bias.

Neighbouring channels of a head make a pair. The layers of the later ones that see everything have no positions.
"""

from ..rules.operations import DeinterleaveRotaryNorms
from ..rules.table import Rule
from ..values import Computed, Flag, only_sliding_layers_rotate
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import every, rotary
from .shared import ATTENTION, LLAMA, MLP

STRUCTURE = {**LLAMA, "norm_type": "layer_norm", "norm_bias": False, "residual": "parallel_shared_norm"}
MODULES = {**ATTENTION, **MLP, "input_layernorm": "self_attn_pre_norm"}
FIELDS = {"logit_scale": "logit_scale"}


def norms_of_heads(config):
    """Norms of heads have pairs side by side, too."""
    op = DeinterleaveRotaryNorms(config.head_dim, config.head_dim)
    return [Rule(name, name, op) for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight")]


COHERE = Family(
    "cohere",
    "CohereForCausalLM CohereModel",
    structure=STRUCTURE,
    fresh={**rotary(500_000.0), "norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    names=DecoderNames(layer=MODULES, pairs=True, more_rules=norms_of_heads),
    settings=DecoderSettings(
        fields=FIELDS,
        computed=[Flag("use_qk_norm", "qk_norm", (False, "per_head"))],
    ),
)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM Cohere2Model",
    structure=STRUCTURE,
    fresh={
        **rotary(50_000.0),
        **every(4, 4096),
        **every(4),
        "norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    names=DecoderNames(layer=MODULES, pairs=True),
    settings=DecoderSettings(
        fields=FIELDS,
        computed=[Computed(only_sliding_layers_rotate)],
    ),
)
