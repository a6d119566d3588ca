"""Phi (Li et al., 2023) and, after Llama, Phi-3 and Phi-4 (Abdin et al., 2024).

Phi has parallel sub-layers that share a norm, and turns a part of each head. Phi-3 keeps queries, keys and values in
one matrix, gate and up projection in another.
"""

from ..values import Computed, Flag, Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import FUSED_MLP, LLAMA, NORMS, QKV, ROTARY_GPT, fields_without

TRAINED = "original_max_position_embeddings"


def write_trained_length(config, head):
    """The length of training, which "longrope" counts from."""
    return {TRAINED: (config.rope_parameters or {}).get(TRAINED, config.max_position_embeddings)}


PHI = Family(
    "phi",
    "PhiForCausalLM PhiModel PhiForSequenceClassification PhiForTokenClassification",
    structure={**ROTARY_GPT, "residual": "parallel_shared_norm", "lm_head_bias": True},
    fresh={**rotary(10_000.0, 0.5), "hidden_act": "gelu_new", "norm_eps": 1e-5},
    names=DecoderNames(
        head_bias=True,
        layer={
            **{name: name for name in QKV},
            "self_attn.dense": "self_attn.o_proj",
            "self_attn.q_layernorm": "self_attn.q_norm",
            "self_attn.k_layernorm": "self_attn.k_norm",
            "mlp.fc1": "mlp.up_proj",
            "mlp.fc2": "mlp.down_proj",
            "input_layernorm": "self_attn_pre_norm",
        },
        outer={"embed_tokens": "embed_tokens", "final_layernorm": "norm"},
    ),
    settings=DecoderSettings(
        rope=Rope(by_part=True),
        computed=[Flag("qk_layernorm", "qk_norm", (False, True))],
    ),
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM Phi3Model Phi3ForSequenceClassification Phi3ForTokenClassification",
    structure=LLAMA,
    fresh=rotary(10_000.0),
    names=DecoderNames(layer={"self_attn.qkv_proj": QKV, "self_attn.o_proj": "self_attn.o_proj", **FUSED_MLP, **NORMS}),
    settings=DecoderSettings(
        usual=fields_without("embd_pdrop"),
        rope=Rope(by_part=True),
        computed=[Computed(writer=write_trained_length)],
    ),
)
