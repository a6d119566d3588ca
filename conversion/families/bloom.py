"""BLOOM (BigScience, 2022): ALiBi, layer norms, one on the embeddings too."""

from ..values import InnerSize
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import four_widths
from .gpt_neox import NETWORK, by_head
from .shared import GPT, NORMS, QKV


def exact_slices(official):
    """Exact products of slices leave out two biases."""
    sliced = official.get("slow_but_exact") and official.get("pretraining_tp") not in (None, 1)
    return ["slow_but_exact"] if sliced else []


FAMILY = Family(
    "bloom",
    "BloomForCausalLM BloomModel BloomForSequenceClassification BloomForTokenClassification BloomForQuestionAnswering",
    structure={**GPT, "position_type": "alibi", "embedding_norm": True, "hidden_act": "gelu_pytorch_tanh"},
    fresh={"intermediate_size": four_widths, "norm_eps": 1e-5, "tie_word_embeddings": True},
    names=DecoderNames(
        root="transformer.",
        token_head="classifier",
        layer={
            "self_attention.query_key_value": QKV,
            "self_attention.dense": "self_attn.o_proj",
            **NETWORK,
            **NORMS,
        },
        outer={"word_embeddings": "embed_tokens", "word_embeddings_layernorm": "embedding_norm", "ln_f": "norm"},
        layers="h.{layer}.",
        split=by_head,
    ),
    settings=DecoderSettings(
        rope=None,
        computed=[InnerSize()],
        unsupported={"apply_residual_connection_post_layernorm": (None, False)},
        contradictions=exact_slices,
        without_effect=["max_position_embeddings"],
    ),
    pad_token_learns=True,
)
