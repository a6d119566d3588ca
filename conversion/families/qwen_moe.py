"""Qwen2-MoE, Qwen3-MoE and decoders after them."""

from ..storage.spelling import Ending
from ..values import Computed, RopeByLayerType, only_sliding_layers_rotate
from .base import Family
from .decoder import DecoderSettings
from .fresh import by_type, every, rotary
from .further import LIKE_MELLUM
from .shared import LLAMA, sinks
from .with_experts import FINE, SHARED, SPARSE_STEP, ExpertNames

# Qwen2-MoE (Qwen team, 2024): experts in addition to one for every token, whose output has a learned factor.
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM Qwen2MoeModel Qwen2MoeForSequenceClassification "
    "Qwen2MoeForTokenClassification Qwen2MoeForQuestionAnswering",
    structure={**LLAMA, "attention_bias": True, "shared_expert_gate": True},
    fresh={**rotary(1_000_000.0), **FINE, "shared_expert_intermediate_size": 1536, "norm_topk_prob": False},
    names=ExpertNames(qa_root="model.", sparse={**SHARED, "shared_expert_gate": "shared_expert_gate"}),
    settings=DecoderSettings(fields={"qkv_bias": "attention_bias"}, computed=(SPARSE_STEP,)),
)


# Qwen3-MoE (Yang et al., 2025): Qwen3 with experts.
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM Qwen3MoeModel Qwen3MoeForSequenceClassification "
    "Qwen3MoeForTokenClassification Qwen3MoeForQuestionAnswering",
    structure={**LLAMA, "qk_norm": True},
    fresh={**rotary(1_000_000.0), **FINE},
    names=ExpertNames(),
    settings=DecoderSettings(fields={"num_experts": "num_experts"}, computed=(SPARSE_STEP,)),
)


# Flint (Recursive, 2026): Qwen3-MoE with sigmoid scores, attention sinks and windows; only layers with one rotate.
FLINT = Family(
    "flint",
    "FlintForCausalLM FlintModel",
    structure={**LLAMA, "qk_norm": True, "attention_sinks": True, "router_score": "sigmoid", "router_float32": True},
    fresh={**rotary(10_000.0), **every(4, 513), **every(4), **FINE, "shared_expert_intermediate_size": 384},
    names=ExpertNames(
        more_rules=sinks, sparse=SHARED, spellings=[Ending({"self_attn.softmax_offset": "self_attn.sinks"})]
    ),
    settings=DecoderSettings(computed=(SPARSE_STEP, Computed(only_sliding_layers_rotate))),
)


# Mellum 2 (JetBrains, 2026): Qwen3-MoE with windows in some layers, and rotary parameters by layer type.
# Checkpoints may hold a layer that predicts one token more.
MELLUM = Family(
    "mellum",
    "MellumForCausalLM MellumModel",
    structure={**LLAMA, "qk_norm": True},
    fresh={**rotary(500_000.0), **every(4, 1024), **by_type(500_000.0, 10_000.0), **FINE},
    names=ExpertNames(outside=["mtp.*"], further=LIKE_MELLUM),
    settings=DecoderSettings(
        fields={"num_experts": "num_experts"},
        rope=RopeByLayerType(by_part=True),
        computed=[LIKE_MELLUM],
        unsupported=dict.fromkeys(("rope_theta", "rope_scaling"), (None,)),
    ),
)
