"""HyperCLOVA X SEED Think (NAVER Cloud, 2025): Granite, perhaps with a second norm after each sub-layer."""

from ..rules.table import module_rules
from ..values import Computed, Factor, Flag
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA


def read_scale(official):
    """The official class fills in what is usual."""
    usual, scale = official.config.head_dim**-0.5, official.config.attention_multiplier
    return {"attention_scale": None if scale == usual else scale}


def output_norms(config):
    """The second norm of each sub-layer."""
    has_them = config.norm_placement == "pre_output"
    return module_rules({"post_norm1": "self_attn_output_norm", "post_norm2": "mlp_output_norm"} if has_them else {})


FAMILY = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM HyperCLOVAXModel",
    structure=LLAMA,
    fresh={**rotary(100_000_000.0), "norm_placement": "pre_output", "norm_eps": 1e-5, "attention_scale": 0.0078125},
    names=DecoderNames(more_rules=output_norms),
    settings=DecoderSettings(
        computed=[
            Flag("use_post_norm", "norm_placement", ("pre", "pre_output")),
            Factor("embedding_multiplier", "embedding_scale"),
            Factor("residual_multiplier", "residual_multiplier"),
            Factor("logits_scaling", "logit_scale"),
            Computed(read_scale, lambda config, head: {"attention_multiplier": config.attention_scale}),
        ],
    ),
)
