"""StarCoder2 (Lozhkov et al., 2024): layer norms, a network without a gate, one window for every layer."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import ALL_BIASES, ATTENTION, NORMS, ROTARY_GPT

FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM Starcoder2Model Starcoder2ForSequenceClassification Starcoder2ForTokenClassification",
    structure=ROTARY_GPT,
    fresh={
        **rotary(100_000.0),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_eps": 1e-5,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    names=DecoderNames(layer={**ATTENTION, **NORMS, "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    settings=DecoderSettings(fields={"use_bias": ALL_BIASES}),
)
