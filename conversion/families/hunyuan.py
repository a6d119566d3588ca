"""Hunyuan's dense models (Tencent, 2025): Llama with a norm on queries and keys after the rotation.

Its checkpoints call their rotation "dynamic", with a factor `alpha` of the base that does not depend on the length of
the text: here it is part of `rope_theta`.
"""

from ..values import Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import ATTENTION, LLAMA, MLP, NORMS


class RopeWithAlpha(Rope):
    """Rotary parameters whose base may have a fixed factor."""

    def read(self, official):
        rope = dict(official.config.rope_parameters or {})
        alpha, size = rope.get("alpha"), official.config.head_dim
        if rope.get("rope_type") != "dynamic" or not alpha:
            return super().read(official)
        theta = rope["rope_theta"] * alpha ** (size / (size - 2))
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


FAMILY = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM HunYuanDenseV1Model HunYuanDenseV1ForSequenceClassification",
    structure={**LLAMA, "qk_norm": "rotated"},
    fresh={**rotary(10_000.0), "norm_eps": 1e-5},
    names=DecoderNames(
        layer={
            **ATTENTION,
            **MLP,
            **NORMS,
            "self_attn.query_layernorm": "self_attn.q_norm",
            "self_attn.key_layernorm": "self_attn.k_norm",
        }
    ),
    settings=DecoderSettings(rope=RopeWithAlpha()),
)
