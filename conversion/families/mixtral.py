"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer."""

from ..storage.experts import OneByOne
from ..values import WindowEverywhere
from .decoder import LLAMA
from .fresh import rotary
from .with_experts import ROUTER_FIELDS, ExpertsFamily

FAMILY = ExpertsFamily(
    "mixtral",
    "MixtralConfig",
    "MixtralForCausalLM MixtralModel MixtralForSequenceClassification "
    "MixtralForTokenClassification MixtralForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(1_000_000.0), "num_experts": 8},
    published=OneByOne("block_sparse_moe.", ("w1", "w3", "w2")),
    fields={
        **{name: name for name in ROUTER_FIELDS if name != "norm_topk_prob"},
        "num_local_experts": "num_experts",
        "intermediate_size": ("intermediate_size", "moe_intermediate_size"),
    },
    unsupported={"router_jitter_noise": (0, 0.0, None)},
    window=WindowEverywhere(),
    qa_root="model.",
)
