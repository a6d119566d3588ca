"""Command R (Cohere, 2024) and Command R7B and A (2025): parallel sub-layers that share a layer norm without a bias.

Neighbouring channels of a head make a pair. The layers of the later ones that see everything have no positions.
"""

from ..rules.operations import FlatPairs
from ..rules.table import Rule
from .fields import Computed, Flag, HeadDim, WindowByLayer
from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, LAYER, LAYER_NORM, MLP, LlamaLikeFamily
from .rope import only_sliding_layers_rotate

MODULES = {**ATTENTION, **MLP, "input_layernorm": "self_attn_pre_norm"}
FIELDS = {**LAYER_NORM, "attention_bias": ALL_ATTENTION_BIASES, "logit_scale": "logit_scale"}


class CohereFamily(LlamaLikeFamily):
    """Command R, whose norms of heads have pairs side by side too."""

    def more_rules(self, config):
        """See `LlamaLikeFamily.more_rules`."""
        names = (f"{LAYER}self_attn.{name}_norm.weight" for name in "qk")
        return [Rule(name, name, FlatPairs(config.head_dim, config.head_dim)) for name in names]


COHERE = CohereFamily(
    "cohere",
    "Cohere",
    layer=MODULES,
    pairs=True,
    fields=FIELDS,
    head_dim=HeadDim(always=False),
    computed=[Flag("use_qk_norm", "qk_norm", (False, "per_head"))],
)
COHERE2 = LlamaLikeFamily(
    "cohere2",
    "Cohere2",
    layer=MODULES,
    pairs=True,
    fields=FIELDS,
    window=WindowByLayer(by_flag=False),
    head_dim=HeadDim(always=False),
    computed=[Computed(only_sliding_layers_rotate)],
)
