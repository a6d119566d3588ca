"""AFM (Arcee, 2025): Llama with a network without a gate, and squared ReLU."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA

FAMILY = Family(
    "arcee",
    "ArceeConfig",
    "ArceeForCausalLM ArceeModel ArceeForSequenceClassification ArceeForTokenClassification ArceeForQuestionAnswering",
    structure={**LLAMA, "gated_mlp": False},
    fresh={**rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
    names=DecoderNames(),
    settings=DecoderSettings(),
)
