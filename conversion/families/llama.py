"""Llama (Touvron et al., 2023): `attention_bias` also covers the output projection."""

from .llama_like import ALL_ATTENTION_BIASES, LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "llama",
    "Llama",
    spans="transformer.",
    fields={"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
    former_names={"LLaMAForCausalLM": "LlamaForCausalLM", "LLaMAModel": "LlamaModel"},
)
