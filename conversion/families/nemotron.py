"""Nemotron (Parmar et al., 2024): layer norms with the factor 1 + weight, squared ReLU, a part of each head turns."""

from ..values import Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import ALL_ATTENTION_BIASES, ALL_BIASES, ATTENTION, NORMS, PLAIN_MLP, ROTARY_GPT, fields_without

FAMILY = Family(
    "nemotron",
    "NemotronConfig",
    "NemotronForCausalLM NemotronModel NemotronForSequenceClassification "
    "NemotronForTokenClassification NemotronForQuestionAnswering",
    structure={**ROTARY_GPT, "norm_weight": "zero_centered"},
    fresh={**rotary(10_000.0, 0.5), **dict.fromkeys(ALL_BIASES, False), "hidden_act": "relu2", "norm_eps": 1e-5},
    names=DecoderNames(layer={**ATTENTION, **PLAIN_MLP, **NORMS}),
    settings=DecoderSettings(
        reads_whole=False,
        usual=fields_without("rms_norm_eps"),
        fields={"norm_eps": "norm_eps", "attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
        rope=Rope(by_part=True),
        extra_fields=["partial_rotary_factor"],
    ),
)
