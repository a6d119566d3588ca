"""Phi-3 and Phi-4 (Abdin et al., 2024): queries, keys and values in one matrix, gate and up projection in another."""

from .fields import Computed, Rope, WindowEverywhere
from .llama_like import FUSED_MLP, NORMS, QKV, LlamaLikeFamily

TRAINED = "original_max_position_embeddings"


def write_trained_length(config, head):
    """The length of training, which "longrope" counts from."""
    return {TRAINED: (config.rope_parameters or {}).get(TRAINED, config.max_position_embeddings)}


FAMILY = LlamaLikeFamily(
    "phi3",
    "Phi3",
    layer={"self_attn.qkv_proj": QKV, "self_attn.o_proj": "self_attn.o_proj", **FUSED_MLP, **NORMS},
    fields={"resid_pdrop": "hidden_dropout"},
    rope=Rope(by_part=True),
    window=WindowEverywhere(),
    computed=[Computed(writer=write_trained_length)],
    unsupported={"embd_pdrop": (0, 0.0)},
)
