"""Nemotron (Parmar et al., 2024): layer norms with the factor 1 + weight, squared ReLU, a part of each head turns."""

from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, NORMS, PLAIN_MLP, LlamaLikeFamily
from .rope import Rope

FAMILY = LlamaLikeFamily(
    "nemotron",
    "Nemotron",
    spans="transformer.",
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
