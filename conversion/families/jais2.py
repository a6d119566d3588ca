"""Jais 2 (Inception, 2025): Llama with layer norms, and squared ReLU without a gate."""

from .base import Family
from .fresh import rotary
from .shared import ROTARY_GPT

FAMILY = Family(
    "jais2",
    "Jais2ForCausalLM Jais2Model",
    structure=ROTARY_GPT,
    fresh={**rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
)
