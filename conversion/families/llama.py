"""Llama (Touvron et al., 2023): `attention_bias` also covers the output projection."""

from .decoder import ALL_ATTENTION_BIASES, LLAMA, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "llama",
    "LlamaConfig",
    "LlamaForCausalLM LlamaModel LlamaForSequenceClassification LlamaForTokenClassification LlamaForQuestionAnswering",
    structure=LLAMA,
    fresh=rotary(10_000.0),
    qa_root="transformer.",
    fields={"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
    former_names={"LLaMAForCausalLM": "LlamaForCausalLM", "LLaMAModel": "LlamaModel"},
)
