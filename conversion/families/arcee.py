"""AFM (Arcee, 2025): Llama with a network without a gate, and squared ReLU."""

from .decoder import ALL_ATTENTION_BIASES, ATTENTION, LLAMA, NORMS, PLAIN_MLP, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "arcee",
    "ArceeConfig",
    "ArceeForCausalLM ArceeModel ArceeForSequenceClassification ArceeForTokenClassification ArceeForQuestionAnswering",
    structure={**LLAMA, "gated_mlp": False},
    fresh={**rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
    qa_root="transformer.",
    layer={**ATTENTION, **PLAIN_MLP, **NORMS},
    fields={"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
)
