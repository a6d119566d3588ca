"""Llama (Touvron et al., 2023): `attention_bias` also covers the output projection."""

from .base import Family
from .decoder import ALL_ATTENTION_BIASES, LLAMA, DecoderNames, DecoderSettings
from .decoder_heads import decoder_heads
from .fresh import rotary

FAMILY = Family(
    "llama",
    "LlamaConfig",
    decoder_heads(
        "LlamaForCausalLM LlamaModel LlamaForSequenceClassification "
        "LlamaForTokenClassification LlamaForQuestionAnswering",
        qa_root="transformer.",
    ),
    structure=LLAMA,
    fresh=rotary(10_000.0),
    names=DecoderNames(former_classes={"LLaMAForCausalLM": "LlamaForCausalLM", "LLaMAModel": "LlamaModel"}),
    settings=DecoderSettings(fields={"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"}),
)
