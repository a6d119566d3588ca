"""XGLM (Lin et al., 2022): M2M-100's decoder as a language model of its own: computed positions, which begin at 2."""

from .base import Family
from .biogpt import LAYER, SCALE
from .decoder import DecoderNames, DecoderSettings
from .fresh import root_of_width
from .shared import GPT


def zeroed_position(official):
    """The row of the padding token's number is zero in the official table, so that it must lie before the first."""
    return ["pad_token_id"] if (official.get("pad_token_id") or 0) > 1 else []


FAMILY = Family(
    "xglm",
    "XGLMConfig",
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
)
