"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer."""

from ..storage.experts import OneByOne
from .base import Family
from .decoder import DecoderSettings
from .decoder_heads import decoder_heads
from .fresh import rotary
from .shared import LLAMA
from .with_experts import ExpertNames

FAMILY = Family(
    "mixtral",
    "MixtralConfig",
    decoder_heads(
        "MixtralForCausalLM MixtralModel MixtralForSequenceClassification "
        "MixtralForTokenClassification MixtralForQuestionAnswering",
        qa_root="model.",
    ),
    structure=LLAMA,
    fresh={**rotary(1_000_000.0), "num_experts": 8},
    names=ExpertNames(published=OneByOne("block_sparse_moe.", ("w1", "w3", "w2"))),
    settings=DecoderSettings(
        fields={"intermediate_size": ("intermediate_size", "moe_intermediate_size")},
        unsupported={"router_jitter_noise": (0, 0.0, None)},
    ),
)
