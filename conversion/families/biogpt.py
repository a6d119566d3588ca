"""BioGPT (Luo et al., 2022): OPT's positions and norms, and embeddings that may be scaled by the root of the width.

XGLM (Lin et al., 2022) has its norms and scale.
"""

from dataclasses import replace

from ..values import Computed, RootOfWidth
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .decoder_heads import TOKENS, decoder_heads
from .fresh import root_of_width
from .opt import MODULES
from .shared import GPT, fields_without

CLASSES = "BioGptForCausalLM BioGptModel BioGptForSequenceClassification BioGptForTokenClassification"
HEADS = [
    replace(head, tensors={"output_projection.weight": "lm_head.weight"}) if head.writes_text else head
    for head in decoder_heads(CLASSES, "biogpt.", token_head="classifier")
]
LAYER = {**MODULES, "self_attn_layer_norm": "self_attn_pre_norm", "final_layer_norm": "mlp_pre_norm"}
SCALE = RootOfWidth("scale_embedding")


def read_dropout(official):
    """Without its own dropout, the official head of tokens has the layers'."""
    if not official.head.official.endswith(TOKENS):
        return {}
    return {"classifier_dropout": official.entries.get("classifier_dropout")}


FAMILY = Family(
    "biogpt",
    HEADS,
    structure={**GPT, "position_type": "learned", "position_offset": 2, "norm_eps": 1e-5},
    fresh={"hidden_act": "gelu", "embedding_scale": root_of_width, "tie_word_embeddings": True},
    names=DecoderNames(
        layer=LAYER, outer={"embed_tokens": "embed_tokens", "embed_positions": "embed_positions", "layer_norm": "norm"}
    ),
    settings=DecoderSettings(
        usual=fields_without("layer_norm_eps"),
        rope=None,
        head_dim=None,
        computed=[SCALE, Computed(read_dropout)],
        training_only=["layerdrop"],
    ),
    scales_in_embedding=True,
)


# XGLM (Lin et al., 2022): M2M-100's decoder as a language model, with computed positions, which begin at 2.
def zeroed_position(official):
    """The row of the padding token's number is zero in the official table, so that it must lie before the first."""
    return ["pad_token_id"] if (official.get("pad_token_id") or 0) > 1 else []


XGLM = Family(
    "xglm",
    "XGLMForCausalLM XGLMModel",
    structure={**GPT, "position_type": "sinusoidal_inclusive", "position_offset": 2, "norm_eps": 1e-5},
    fresh={"hidden_act": "gelu", "embedding_scale": root_of_width, "tie_word_embeddings": True, "pad_token_id": 1},
    names=DecoderNames(
        layer=LAYER, outer={"embed_tokens": "embed_tokens", "layer_norm": "norm"}, ignored=["embed_positions.weights"]
    ),
    settings=DecoderSettings(
        fields={"attention_heads": "num_attention_heads"},
        rope=None,
        head_dim=None,
        computed=[SCALE],
        training_only=["layerdrop"],
        contradictions=zeroed_position,
    ),
    scales_in_embedding=True,
)
