"""BLOOM (BigScience, 2022): ALiBi, layer norms, one on the embeddings too."""

from .fields import HeadDim, InnerSize
from .gpt_neox import by_head
from .llama_like import NORMS, QKV, LlamaLikeFamily


class BloomFamily(LlamaLikeFamily):
    """BLOOM, whose exact products of slices leave out two biases."""

    def _unsupported(self, official):
        sliced = official.get("slow_but_exact") and official.get("pretraining_tp") not in (None, 1)
        return [*super()._unsupported(official), *(["slow_but_exact"] if sliced else [])]


FAMILY = BloomFamily(
    "bloom",
    "Bloom",
    layer={
        "self_attention.query_key_value": QKV,
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
        **NORMS,
    },
    outer={"word_embeddings": "embed_tokens", "word_embeddings_layernorm": "embedding_norm", "ln_f": "norm"},
    root="transformer.",
    layers="h.{layer}.",
    tokens="classifier",
    split=by_head,
    fields={
        **dict.fromkeys("num_key_value_heads intermediate_size hidden_act max_position_embeddings".split()),
        "rms_norm_eps": None,
        "layer_norm_epsilon": "norm_eps",
        "hidden_dropout": "hidden_dropout",
    },
    rope=InnerSize(),
    head_dim=HeadDim(always=False),
    unsupported={"apply_residual_connection_post_layernorm": (None, False)},
    without_effect=["max_position_embeddings"],
)
