"""Seed-OSS (ByteDance, 2025): Llama with a switch for each bias."""

from .llama_like import LlamaLikeFamily

FAMILY = LlamaLikeFamily(
    "seed_oss",
    "SeedOss",
    spans="transformer.",
    fields={
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_output_bias",
        "mlp_bias": "mlp_bias",
        "residual_dropout": "hidden_dropout",
    },
)
