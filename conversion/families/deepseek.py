"""DeepSeek-V2 (DeepSeek-AI, 2024), DeepSeek-V3 and R1 (2025): latent attention, experts in groups, dense first layers.

The last channels of each head turn, in neighbouring pairs; ours come first. Checkpoints of V3 hold a layer after the
last one, which predicts one token more, and have linear maps of 8 bits (`storage/fp8.py`). Others have its attention.
"""

import math
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError
from blockformer.model.rotary import rotary_size

from ..rules.operations import Chain, DeinterleaveRotary, Each, Identity, LastFirst, Split
from ..rules.table import Rule, module_rules
from ..values import Computed, Factor, Rope, part_of, roundest
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .further import LIKE_DEEPSEEK
from .ministral3 import RopeWithGrowth
from .oracle import Oracle, wrong_before
from .shared import LLAMA, MLP, NORMS
from .with_experts import (
    FINE,
    FIRST_DENSE,
    FLOAT32_ROUTER,
    GROUPS_SINCE,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    ExpertNames,
    expert_groups,
    shared_experts,
)

LATENT = "self_attn.kv_a_proj_with_mqa"


def attention_rules(config: PretrainedConfig, pairs: bool = True) -> list[Rule]:
    """The rules of attention whose matrices hold several of ours, or channels in another order.

    Args:
        config: ours.
        pairs: whether the official class turns neighbouring channels.
    """
    heads, size = config.num_attention_heads, config.head_dim
    rotated = rotary_size(config.rope_parameters, size)
    of_keys, of_queries = (DeinterleaveRotary(each, rotated) if pairs else Identity() for each in (rotated, size))
    latent = Chain(Split(0, (config.kv_lora_rank or 0, rotated)), Each((Identity(), of_keys)))
    keys_and_values = Split(0, (heads * (size - rotated), heads * (config.v_head_dim or 0)), heads)
    queries = "self_attn.q_proj.weight" if config.q_lora_rank is None else "self_attn.q_b_proj.weight"
    return [
        *module_rules({LATENT: ("self_attn.kv_a_proj", "self_attn.k_rope_proj")}, latent),
        Rule("self_attn.kv_b_proj.weight", ("self_attn.k_proj.weight", "self_attn.v_proj.weight"), keys_and_values),
        Rule(queries, "self_attn.q_proj.weight", Chain(LastFirst(size, rotated), of_queries)),
    ]


class LatentRope(Rope):
    """Sizes of a head's parts, of which one turns, and a scale of the scores that depends on the rotary parameters."""

    def read(self, official):
        config = official.config
        rotated, whole = config.qk_rope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
        if (size := getattr(config, "head_dim", None)) not in (None, rotated, whole):
            raise ConversionError(
                f"config.json: head_dim is {size}, and of {whole} channels {rotated} turn; leave head_dim out"
            )
        found = super().read(official)
        rope = found["rope_parameters"]
        scale, stretch = None, rope.get("mscale_all_dim")
        if rope.get("rope_type") != "default" and stretch:
            factor = 0.1 * stretch * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0
            scale = whole**-0.5 * factor * factor
        return {
            **found,
            "head_dim": whole,
            "rope_parameters": {**rope, "partial_rotary_factor": part_of(rotated, whole)},
            "attention_scale": scale,
        }

    def write(self, config, head):
        rope = dict(super().write(config, head)["rope_parameters"])
        rotated = rotary_size(config.rope_parameters or {}, config.head_dim)
        rope.pop("partial_rotary_factor", None)
        return {
            "rope_parameters": rope,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": config.head_dim - rotated,
        }


def _method(config: PretrainedConfig, head: Any) -> dict[str, Any]:
    return {"topk_method": "greedy" if config.num_expert_groups == 0 else "group_limited_greedy"}


# Sizes of a fresh model.
FRESH = {
    **rotary(10_000.0, 0.5),
    **FINE,
    "kv_lora_rank": 128,
    "num_expert_groups": 2,
    "num_expert_groups_per_tok": 1,
    "experts_per_group_score": 2,
}
LATENT_NAMES: dict[str, Any] = {
    "layer": {
        **MLP,
        **NORMS,
        "self_attn.kv_a_layernorm": "self_attn.kv_a_norm",
        "self_attn.q_a_proj": "self_attn.q_a_proj",
        "self_attn.q_a_layernorm": "self_attn.q_a_norm",
        "self_attn.o_proj": "self_attn.o_proj",
    },
    "more_rules": attention_rules,
}
LATENT_SETTINGS: dict[str, Any] = {"head_dim": None, "rope": LatentRope(), "not_none": ("kv_lora_rank",)}
"""Names and settings of a family with latent attention."""
LATENT_FIELDS = {name: name for name in ("kv_lora_rank", "q_lora_rank", "v_head_dim")}
SETTINGS: dict[str, Any] = {**LATENT_SETTINGS, "without_effect": ("router_aux_loss_coef", "output_router_logits")}
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM DeepseekV2Model DeepseekV2ForSequenceClassification",
    structure={**LLAMA, "latent_norm_eps": 1e-6, "norm_topk_prob": False, "router_float32": True},
    fresh={**FRESH, "shared_expert_intermediate_size": 768, "experts_per_group_score": 1},
    names=ExpertNames(sparse=SHARED_EXPERTS, **LATENT_NAMES),
    settings=DecoderSettings(
        fields=LATENT_FIELDS,
        unsupported={
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "moe_layer_freq": (1,),
        },
        computed=(shared_experts("n_shared_experts"), FIRST_DENSE, expert_groups(1), Computed(writer=_method)),
        **SETTINGS,
    ),
    # Older classes choose among groups, and scale scores with YaRN, otherwise than today's.
    oracle=Oracle(not_runnable=lambda family, config: wrong_before((5, 15), family)),
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM DeepseekV3Model DeepseekV3ForSequenceClassification DeepseekV3ForTokenClassification",
    structure={**LLAMA, "latent_norm_eps": 1e-6, **SIGMOID_ROUTER},
    fresh={**FRESH, "shared_expert_intermediate_size": 384, "q_lora_rank": 192, "routed_scaling_factor": 2.5},
    names=ExpertNames(sparse=SHARED_EXPERTS, ignored=["layers.{beyond}.*"], further=LIKE_DEEPSEEK, **LATENT_NAMES),
    settings=DecoderSettings(
        fields=LATENT_FIELDS,
        unsupported={
            "rope_interleave": (True,),
            "topk_method": ("noaux_tc",),
            "scoring_func": ("sigmoid",),
            "moe_layer_freq": (1,),
        },
        computed=(
            shared_experts("n_shared_experts"),
            FIRST_DENSE,
            expert_groups(2),
            LIKE_DEEPSEEK,
        ),
        **SETTINGS,
    ),
    oracle=Oracle(not_runnable=lambda family, config: wrong_before(GROUPS_SINCE, family)),
)


# GLM-4.7-Flash (GLM team, 2026): GLM-4.5's experts, and DeepSeek's latent attention.
# Checkpoints hold a layer after the last one, which predicts one token more.
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM Glm4MoeLiteModel",
    structure={
        **LLAMA,
        "latent_norm_eps": 1e-6,
        **FLOAT32_ROUTER,
    },
    fresh={
        **FRESH,
        "num_expert_groups": 0,
        "num_expert_groups_per_tok": 0,
        "experts_per_group_score": 0,
        "shared_expert_intermediate_size": 384,
        "q_lora_rank": 192,
        "norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
    },
    names=ExpertNames(sparse=SHARED_EXPERTS, ignored=["layers.{beyond}.*"], further=LIKE_DEEPSEEK, **LATENT_NAMES),
    settings=DecoderSettings(
        fields=LATENT_FIELDS,
        unsupported={"rope_interleave": (True,)},
        computed=(shared_experts("n_shared_experts"), expert_groups(2), LIKE_DEEPSEEK),
        extra_fields=["num_nextn_predict_layers"],
        **SETTINGS,
    ),
)


# Youtu-LLM (Tencent, 2025): Llama with DeepSeek's latent attention.
YOUTU = Family(
    "youtu",
    "YoutuForCausalLM YoutuModel",
    structure={**LLAMA, "latent_norm_eps": 1e-6},
    fresh={**rotary(1_600_000.0, 0.5), "kv_lora_rank": 128, "q_lora_rank": 192, "tie_word_embeddings": True},
    names=DecoderNames(**LATENT_NAMES),
    settings=DecoderSettings(
        fields=LATENT_FIELDS, unsupported={"rope_interleave": (True,), "mlp_bias": (None, False)}, **LATENT_SETTINGS
    ),
)


# MiniCPM3 (OpenBMB, 2024): DeepSeek's latent attention, and factors of embeddings, residuals and logits.
# The halves of the channels that turn are its pairs, as in Llama. A config says the factors by sizes: of the residuals
# by the number of layers, of the logits by the width of a smaller model.
def read_factors(official):
    """Our factors, None where they change nothing."""
    config = official.config
    depth, layers = config.scale_depth, math.sqrt(config.num_hidden_layers)
    width, base = config.hidden_size, config.dim_model_base
    return {
        "residual_multiplier": None if depth == layers else depth / layers,
        "logit_scale": None if base == width else base / width,
    }


def write_factors(config, head):
    """The way back."""
    layers, factor = math.sqrt(config.num_hidden_layers), config.residual_multiplier
    return {
        "scale_depth": layers if factor is None else roundest(factor * layers, lambda each: each / layers == factor),
        "dim_model_base": max(round(config.hidden_size * (config.logit_scale or 1)), 1),
    }


MINICPM3 = Family(
    "minicpm3",
    "MiniCPM3ForCausalLM MiniCPM3Model MiniCPM3ForSequenceClassification",
    structure={**LLAMA, "latent_norm_eps": 1e-6},
    fresh={
        **rotary(10_000.0, 0.5),
        "kv_lora_rank": 128,
        "q_lora_rank": 192,
        "norm_eps": 1e-5,
        "embedding_scale": 12.0,
        "residual_multiplier": lambda settings: 1.4 / math.sqrt(settings["num_hidden_layers"]),
        "logit_scale": lambda settings: 256 / settings["hidden_size"],
        "tie_word_embeddings": True,
    },
    names=DecoderNames(**{**LATENT_NAMES, "more_rules": partial(attention_rules, pairs=False)}),
    settings=DecoderSettings(
        fields=LATENT_FIELDS,
        computed=[Factor("scale_emb", "embedding_scale"), Computed(read_factors, write_factors)],
        **LATENT_SETTINGS,
    ),
    scales_in_embedding="rounded",
)


# Mistral Small 4 (Mistral AI, 2026): DeepSeek's latent attention, whose queries grow with their position, and experts
# that are chosen by a softmax. Its config says twice which part of a head turns.
class LatentRopeWithGrowth(LatentRope, RopeWithGrowth):
    """The rotary parameters of a part of each head, and how queries grow."""

    def read(self, official):
        config = official.config
        part, rotated = config.rope_parameters["partial_rotary_factor"], config.qk_rope_head_dim
        if int(part * (config.qk_nope_head_dim + rotated)) != rotated:
            raise ConversionError(
                f"config.json: partial_rotary_factor of rope_parameters is {part}, and qk_rope_head_dim is {rotated} "
                f"of {config.qk_nope_head_dim + rotated}; leave partial_rotary_factor out"
            )
        return super().read(official)


MISTRAL4 = Family(
    "mistral4",
    "Mistral4ForCausalLM Mistral4Model Mistral4ForSequenceClassification Mistral4ForTokenClassification",
    structure={**LLAMA, "latent_norm_eps": 1e-6},
    fresh={
        **FRESH,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "partial_rotary_factor": 0.5,
        },
        "num_expert_groups": 0,
        "num_expert_groups_per_tok": 0,
        "experts_per_group_score": 0,
        "shared_expert_intermediate_size": 384,
        "q_lora_rank": 192,
        "query_growth": 0.1,
    },
    names=ExpertNames(sparse=SHARED_EXPERTS, published=None, **LATENT_NAMES),
    settings=DecoderSettings(
        fields=LATENT_FIELDS,
        unsupported={"rope_interleave": (True,)},
        computed=(shared_experts("n_shared_experts"), FIRST_DENSE, expert_groups(2)),
        **{**SETTINGS, "rope": LatentRopeWithGrowth(by_part=True)},
    ),
)
