"""Llama (Touvron et al., 2023): `attention_bias` also covers the output projection."""

from .llama_like import ALL_ATTENTION_BIASES, MLP_BIAS, O_BIAS, QKV_BIAS, LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "llama",
    "Llama",
    tensors=(*QKV_BIAS, *O_BIAS, *MLP_BIAS),
    fields={"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
)
