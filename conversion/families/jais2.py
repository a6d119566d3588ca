"""Jais 2 (Inception, 2025): Llama with layer norms, and squared ReLU without a gate."""

from .decoder import ALL_ATTENTION_BIASES, ATTENTION, LAYER_NORM, NORMS, PLAIN_MLP, ROTARY_GPT, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "jais2",
    "Jais2Config",
    "Jais2ForCausalLM Jais2Model",
    structure=ROTARY_GPT,
    fresh={**rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
    layer={**ATTENTION, **PLAIN_MLP, **NORMS},
    fields={**LAYER_NORM, "attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
)
