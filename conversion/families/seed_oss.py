"""Seed-OSS (ByteDance, 2025): Llama with a switch for each bias."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA

FAMILY = Family(
    "seed_oss",
    "SeedOssConfig",
    "SeedOssForCausalLM SeedOssModel SeedOssForSequenceClassification "
    "SeedOssForTokenClassification SeedOssForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(10_000_000.0), "attention_bias": True},
    names=DecoderNames(),
    settings=DecoderSettings(
        fields={"attention_bias": "attention_bias", "attention_out_bias": "attention_output_bias"}
    ),
)
