"""Phi-3.5-MoE (Abdin et al., 2024): Mixtral with layer norms, biases and its own router, SparseMixer (Liu et al.).

In evaluation an expert's weight is its share among the logits near its own. In training the official router draws
experts at random and has its own gradient; ours takes the same experts and weights as in evaluation. In texts
longer than `original_max_position_embeddings` ours turns by the long factors, transformers 5.23 by the short ones.
"""

from blockformer.files.errors import ConversionError, shown

from ..storage.experts import OneByOne
from ..values import Computed, NotExpressible, Rope
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA
from .with_experts import ExpertNames

MSCALES = ("short_mscale", "long_mscale")


class RopeWithMscale(Rope):
    """Rotary parameters whose "longrope" has its factor of cosines and sines for short and for long texts."""

    def read(self, official):
        rope = super().read(official)["rope_parameters"]
        if rope["rope_type"] == "default":
            return {"rope_parameters": rope}
        short, long = (rope.get(name) for name in MSCALES)
        if rope["rope_type"] != "longrope" or short != long:
            raise ConversionError(
                f"config.json: rope_type is {shown(rope['rope_type'])}, short_mscale {shown(short)}, long_mscale "
                f"{shown(long)}; only 'default' can be converted, and 'longrope' with one mscale for both"
            )
        rest = {name: value for name, value in rope.items() if name not in MSCALES}
        return {"rope_parameters": {**rest, "attention_factor": short}}

    def write(self, config, head):
        rope = dict(config.rope_parameters or {})
        if rope.get("rope_type") == "default":
            return {"rope_parameters": rope}
        factor = rope.pop("attention_factor", None)
        if rope.get("rope_type") != "longrope" or factor is None:
            raise NotExpressible("rope_parameters", "'default', or 'longrope' with an attention_factor", rope)
        return {"rope_parameters": {**rope, **dict.fromkeys(MSCALES, factor)}}


MARGIN = Computed(
    lambda official: {"router_margin": 2 * official.config.router_jitter_noise},
    lambda config, head: {"router_jitter_noise": (config.router_margin or 0) / 2},
)


class PhimoeNames(ExpertNames):
    """The names of Phi-3.5-MoE, whose official router computes something else in training."""

    def notes(self, variant):
        return ["in training, the official router draws experts at random; this one chooses them as in evaluation"]


FAMILY = Family(
    "phimoe",
    "PhimoeForCausalLM PhimoeModel PhimoeForSequenceClassification",
    structure={**LLAMA, "norm_type": "layer_norm", "norm_topk_prob": False, "num_experts_per_tok": 2},
    fresh={
        **rotary(1_000_000.0),
        "num_experts": 8,
        "norm_eps": 1e-5,
        "attention_bias": True,
        "attention_output_bias": True,
        "lm_head_bias": True,
        "router_margin": 0.02,
    },
    names=PhimoeNames(
        head_bias=True,
        published=OneByOne("block_sparse_moe.", ("w1", "w3", "w2"), modules={"router": "gate"}),
        router="router",
    ),
    settings=DecoderSettings(
        fields={"intermediate_size": ("intermediate_size", "moe_intermediate_size"), "lm_head_bias": "lm_head_bias"},
        not_none=["router_margin"],
        unsupported={"num_experts_per_tok": (2,)},
        training_only=["input_jitter_noise"],
        rope=RopeWithMscale(),
        computed=[MARGIN],
    ),
)
