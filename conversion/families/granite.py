"""Granite (IBM, 2024): Llama with a factor for embeddings, residuals, scores and logits."""

from typing import Any

from .fields import Computed, Factor, HeadDim, undone
from .llama_like import ALL_ATTENTION_BIASES, LlamaLikeFamily

LOGITS = Computed(
    lambda official: {"logit_scale": 1 / official.config.logits_scaling},
    lambda config, head: {"logits_scaling": undone(config.logit_scale, -1.0)},
)
SETTINGS: dict[str, Any] = {
    "head_dim": HeadDim(always=False),
    "computed": [
        Factor("embedding_multiplier", "embedding_scale"),
        Factor("residual_multiplier", "residual_multiplier"),
        LOGITS,
    ],
    "not_none": ["attention_scale"],
}
FIELDS: dict[str, str | tuple[str, ...] | None] = {
    "attention_bias": ALL_ATTENTION_BIASES,
    "attention_multiplier": "attention_scale",
}
FAMILY = LlamaLikeFamily(
    "granite",
    "Granite",
    fields={**FIELDS, "mlp_bias": "mlp_bias"},
    **SETTINGS,
)
