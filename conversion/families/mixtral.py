"""Mixtral (Jiang et al., 2024) and MiniMax-M2 (MiniMax, 2025), whose experts' names are the same."""

from ..storage.experts import OneByOne
from ..values import Rope
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA
from .with_experts import FINE, SIGMOID_ROUTER, ExpertNames

# Mixtral (Jiang et al., 2024): Mistral with experts in every layer.
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM MixtralModel MixtralForSequenceClassification "
    "MixtralForTokenClassification MixtralForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(1_000_000.0), "num_experts": 8},
    names=ExpertNames(qa_root="model.", published=OneByOne("block_sparse_moe.", ("w1", "w3", "w2"))),
    settings=DecoderSettings(
        fields={"intermediate_size": ("intermediate_size", "moe_intermediate_size")},
        unsupported={"router_jitter_noise": (0, 0.0, None)},
    ),
)


# MiniMax-M2 (MiniMax, 2025): Mixtral with sigmoid scores, norms of queries and keys; a part of each head turns.
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM MiniMaxM2Model",
    structure={**LLAMA, "qk_norm": "projection", **SIGMOID_ROUTER},
    fresh={**rotary(5_000_000.0, 0.5), **FINE},
    names=ExpertNames(
        published=OneByOne("block_sparse_moe.", ("w1", "w3", "w2")), bias_of_choice="e_score_correction_bias"
    ),
    settings=DecoderSettings(
        fields={"intermediate_size": ("intermediate_size", "moe_intermediate_size")},
        rope=Rope(by_part=True),
        unsupported={"router_jitter_noise": (0, 0.0, None)},
    ),
)
