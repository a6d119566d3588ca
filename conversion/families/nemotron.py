"""Nemotron (Parmar et al., 2024): layer norms with the factor 1 + weight, squared ReLU, a part of each head turns."""

from ..values import Rope
from .decoder import ALL_ATTENTION_BIASES, ALL_BIASES, ATTENTION, NORMS, PLAIN_MLP, ROTARY_GPT, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "nemotron",
    "NemotronConfig",
    "NemotronForCausalLM NemotronModel NemotronForSequenceClassification "
    "NemotronForTokenClassification NemotronForQuestionAnswering",
    structure={**ROTARY_GPT, "norm_weight": "zero_centered"},
    fresh={**rotary(10_000.0, 0.5), **dict.fromkeys(ALL_BIASES, False), "hidden_act": "relu2", "norm_eps": 1e-5},
    reads_whole=False,
    qa_root="transformer.",
    layer={**ATTENTION, **PLAIN_MLP, **NORMS},
    fields={
        "rms_norm_eps": None,
        "norm_eps": "norm_eps",
        "attention_bias": ALL_ATTENTION_BIASES,
        "mlp_bias": "mlp_bias",
    },
    rope=Rope(by_part=True),
    extra_fields=["partial_rotary_factor"],
)
