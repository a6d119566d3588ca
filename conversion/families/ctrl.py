"""CTRL (Keskar et al., 2019): GPT with the positions of the original Transformer, all sines first."""

from dataclasses import replace

from ..values import RootOfWidth
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .decoder_heads import ROWS, decoder_heads
from .fresh import root_of_width
from .shared import GPT, READ_TYPED, TYPED

MODULES = {
    "multi_head_attention.Wq": "self_attn.q_proj",
    "multi_head_attention.Wk": "self_attn.k_proj",
    "multi_head_attention.Wv": "self_attn.v_proj",
    "multi_head_attention.dense": "self_attn.o_proj",
    "layernorm1": "self_attn_pre_norm",
    "ffn.0": "mlp.up_proj",
    "ffn.2": "mlp.down_proj",
    "layernorm2": "mlp_pre_norm",
}
HEADS = [
    replace(head, tensors={"classifier.weight": "score.weight"}) if head.ours.endswith(ROWS) else head
    for head in decoder_heads("CTRLLMHeadModel CTRLModel CTRLForSequenceClassification", "transformer.", head_bias=True)
]
FAMILY = Family(
    "ctrl",
    HEADS,
    structure={
        **GPT,
        "position_type": "sinusoidal_halves",
        "hidden_act": "relu",
        "norm_eps": 1e-6,
        "lm_head_bias": True,
    },
    fresh={**TYPED, "embedding_scale": root_of_width, "tie_word_embeddings": True},
    names=DecoderNames(
        layer=MODULES, outer={"w": "embed_tokens", "layernorm": "norm"}, layers="h.{layer}.", root="transformer."
    ),
    settings=DecoderSettings(
        fields={"dff": "intermediate_size"},
        rope=None,
        head_dim=None,
        computed=[RootOfWidth(), READ_TYPED],
        unsupported={"layer_norm_epsilon": (1e-6,)},
    ),
    pad_token_learns=True,
)
