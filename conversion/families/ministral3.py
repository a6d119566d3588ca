"""Ministral 3 (Mistral AI, 2025): Llama whose queries grow with their position, by Llama 4's rule."""

from blockformer.files.errors import ConversionError

from ..values import Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .shared import LLAMA

GROWTH, LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
OTHERS = ("max_position_embeddings",)
"""Entries of `rope_parameters` that no official code reads."""


class RopeWithGrowth(Rope):
    """Rotary parameters that also say how queries grow; growth 0 is none."""

    def read(self, official):
        rope = super().read(official)["rope_parameters"]
        if (growth := rope.pop(GROWTH, None)) is None:
            raise ConversionError(f"config.json: rope_parameters have no {GROWTH}; write 0 if queries do not grow")
        rope = {name: value for name, value in rope.items() if name not in OTHERS}
        if not growth and rope["rope_type"] in ("default", "linear", "dynamic"):
            rope.pop(LENGTH, None)
        return {"rope_parameters": rope, "query_growth": growth or None}

    def write(self, config, head):
        rope = super().write(config, head)["rope_parameters"]
        return {"rope_parameters": {LENGTH: config.max_position_embeddings, **rope, GROWTH: config.query_growth or 0.0}}


FAMILY = Family(
    "ministral3",
    "Ministral3ForCausalLM Ministral3Model Ministral3ForSequenceClassification "
    "Ministral3ForTokenClassification Ministral3ForQuestionAnswering",
    structure=LLAMA,
    fresh={
        "hidden_act": "silu",
        "norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "query_growth": 0.1,
    },
    names=DecoderNames(qa_root="model."),
    settings=DecoderSettings(rope=RopeWithGrowth()),
)
