"""Phi (Li et al., 2023) and, after Llama, Phi-3 and Phi-4 (Abdin et al., 2024).

Phi has parallel sub-layers that share a norm, and turns a part of each head. Phi-3 keeps queries, keys and values in
one matrix, gate and up projection in another.
"""

from .fields import Computed, Flag, HeadDim, WindowEverywhere
from .llama_like import FUSED_MLP, LAYER_NORM, NORMS, QKV, LlamaLikeFamily
from .rope import Rope

TRAINED = "original_max_position_embeddings"


def write_trained_length(config, head):
    """The length of training, which "longrope" counts from."""
    return {TRAINED: (config.rope_parameters or {}).get(TRAINED, config.max_position_embeddings)}


PHI = LlamaLikeFamily(
    "phi",
    "Phi",
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
    head_bias=True,
    fields={**LAYER_NORM, "resid_pdrop": "hidden_dropout", "embd_pdrop": "hidden_dropout"},
    rope=Rope(by_part=True),
    head_dim=HeadDim(always=False),
    computed=[Flag("qk_layernorm", "qk_norm", (False, True))],
    extra_fields=["partial_rotary_factor"],
)
PHI3 = LlamaLikeFamily(
    "phi3",
    "Phi3",
    layer={"self_attn.qkv_proj": QKV, "self_attn.o_proj": "self_attn.o_proj", **FUSED_MLP, **NORMS},
    fields={"resid_pdrop": "hidden_dropout"},
    rope=Rope(by_part=True),
    window=WindowEverywhere(),
    head_dim=HeadDim(always=False),
    computed=[Computed(writer=write_trained_length)],
)
