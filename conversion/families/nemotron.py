"""Nemotron (Parmar et al., 2024): layer norms with the factor 1 + weight, squared ReLU, a part of each head turns."""

from ..values import Rope
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import ALL_BIASES, ROTARY_GPT

FAMILY = Family(
    "nemotron",
    "NemotronForCausalLM NemotronModel NemotronForSequenceClassification "
    "NemotronForTokenClassification NemotronForQuestionAnswering",
    structure={**ROTARY_GPT, "norm_weight": "zero_centered"},
    fresh={**rotary(10_000.0, 0.5), **dict.fromkeys(ALL_BIASES, False), "hidden_act": "relu2", "norm_eps": 1e-5},
    settings=DecoderSettings(reads_whole=False, rope=Rope(by_part=True)),
)
