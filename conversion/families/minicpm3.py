"""MiniCPM3 (OpenBMB, 2024): DeepSeek's latent attention, and factors of embeddings, residuals and logits.

The halves of the channels that turn are its pairs, as in Llama. A config says the factors by sizes: of the residuals by
the number of layers, of the logits by the width of a smaller model.
"""

import math
from functools import partial

from ..values import Computed, Factor, roundest
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .deepseek import LATENT_FIELDS, LATENT_NAMES, LATENT_SETTINGS, attention_rules
from .fresh import rotary
from .shared import LLAMA


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


FAMILY = Family(
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
