"""Llama (Touvron et al., 2023): `attention_bias` also covers the output projection."""

from .llama_like import MLP_BIAS, O_BIAS, QKV_BIAS, DecoderFamily

FAMILY = DecoderFamily(
    name="llama",
    prefix="Llama",
    more=(*QKV_BIAS, *O_BIAS, *MLP_BIAS),
    fields={"attention_bias": ("attention_bias", "attention_output_bias"), "mlp_bias": "mlp_bias"},
)
