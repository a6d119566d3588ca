"""Seed-OSS (ByteDance, 2025): Llama with a switch for each bias."""

from .decoder import LLAMA, DecoderFamily
from .fresh import rotary

FAMILY = DecoderFamily(
    "seed_oss",
    "SeedOssConfig",
    "SeedOssForCausalLM SeedOssModel SeedOssForSequenceClassification "
    "SeedOssForTokenClassification SeedOssForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(10_000_000.0), "attention_bias": True},
    qa_root="transformer.",
    fields={
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_output_bias",
        "mlp_bias": "mlp_bias",
        "residual_dropout": "hidden_dropout",
    },
)
