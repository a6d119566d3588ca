"""Hunyuan's dense models and A13B (Tencent, 2025): Llama with a norm on queries and keys after the rotation.

Its checkpoints call their rotation "dynamic", with a factor `alpha` of the base that does not depend on the length of
the text: here it is part of `rope_theta`.
"""

from blockformer.files.errors import ConversionError, shown

from ..values import Computed, Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import ATTENTION, LLAMA, MLP, NORMS
from .with_experts import ExpertNames


class RopeWithAlpha(Rope):
    """Rotary parameters whose base may have a fixed factor."""

    def read(self, official):
        rope = dict(official.config.rope_parameters or {})
        alpha, size = rope.get("alpha"), official.config.head_dim
        if rope.get("rope_type") != "dynamic" or not alpha:
            return super().read(official)
        theta = rope["rope_theta"] * alpha ** (size / (size - 2))
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


STRUCTURE = {**LLAMA, "qk_norm": "rotated"}
NORMED = {
    **ATTENTION,
    **NORMS,
    "self_attn.query_layernorm": "self_attn.q_norm",
    "self_attn.key_layernorm": "self_attn.k_norm",
}
FRESH = {**rotary(10_000.0), "norm_eps": 1e-5}
DENSE = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM HunYuanDenseV1Model HunYuanDenseV1ForSequenceClassification",
    structure=STRUCTURE,
    fresh=FRESH,
    names=DecoderNames(layer={**NORMED, **MLP}),
    settings=DecoderSettings(rope=RopeWithAlpha()),
)


def _read_experts(official):
    """A13B's config lists its numbers by layer, all of them equal. The expert for every token is as wide as the others.

    The official class reads no other list: its experts are as wide as `intermediate_size`.
    """
    chosen, width = official.config.moe_topk, official.config.intermediate_size
    numbers = {*chosen} if isinstance(chosen, list) else {chosen}
    if len(numbers) != 1:
        raise ConversionError(f"config.json: moe_topk is {shown(chosen)}; here, all layers choose equally many experts")
    return {"num_experts_per_tok": numbers.pop(), "shared_expert_intermediate_size": width}


EXPERTS = Computed(_read_experts, lambda config, head: {"moe_topk": config.num_experts_per_tok})
MOE = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM HunYuanMoEV1Model HunYuanMoEV1ForSequenceClassification",
    structure={**STRUCTURE, "router_float32": True},
    fresh={
        **FRESH,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": lambda settings: settings["intermediate_size"],
    },
    names=ExpertNames(
        layer=NORMED,
        router="gate.wg",
        sparse={f"shared_mlp.{name}": f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    ),
    settings=DecoderSettings(
        fields={
            "num_experts": "num_experts",
            "intermediate_size": ("intermediate_size", "moe_intermediate_size"),
        },
        rope=RopeWithAlpha(),
        computed=[EXPERTS],
        without_effect=("router_aux_loss_coef", "output_router_logits"),
    ),
)
