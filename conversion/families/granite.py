"""Granite (IBM, 2024): Llama with a factor for embeddings, residuals, scores and logits."""

from typing import Any

from ..values import Computed, Factor, invert_power
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA

FRESH = {
    **rotary(10_000.0),
    "embedding_scale": 12.0,
    "residual_multiplier": 0.22,
    "attention_scale": 0.015625,
    "logit_scale": 0.125,
}
LOGITS = Computed(
    lambda official: {"logit_scale": 1 / official.config.logits_scaling},
    lambda config, head: {"logits_scaling": invert_power(config.logit_scale, -1.0)},
)
SETTINGS: dict[str, Any] = {
    "fields": {"attention_multiplier": "attention_scale"},
    "computed": [
        Factor("embedding_multiplier", "embedding_scale"),
        Factor("residual_multiplier", "residual_multiplier"),
        LOGITS,
    ],
    "not_none": ["attention_scale"],
}
FAMILY = Family(
    "granite",
    "GraniteForCausalLM GraniteModel",
    structure=LLAMA,
    fresh=FRESH,
    settings=DecoderSettings(**SETTINGS),
)
