"""AFM (Arcee, 2025): Llama with a network without a gate, and squared ReLU."""

from .base import Family
from .decoder import ALL_ATTENTION_BIASES, ATTENTION, LLAMA, NORMS, PLAIN_MLP, DecoderNames, DecoderSettings
from .decoder_heads import decoder_heads
from .fresh import rotary

FAMILY = Family(
    "arcee",
    "ArceeConfig",
    decoder_heads(
        "ArceeForCausalLM ArceeModel ArceeForSequenceClassification "
        "ArceeForTokenClassification ArceeForQuestionAnswering",
        qa_root="transformer.",
    ),
    structure={**LLAMA, "gated_mlp": False},
    fresh={**rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
    names=DecoderNames(layer={**ATTENTION, **PLAIN_MLP, **NORMS}),
    settings=DecoderSettings(fields={"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"}),
)
