"""GPT-NeoX and Pythia (Black et al., 2022): parallel sub-layers, rotation of a part of each head.

Queries, keys and values of a head are side by side in one matrix, as in Persimmon (Adept, 2023).
"""

from ..rules.operations import Split
from ..storage.spelling import Ending
from ..values import Flag, Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import NORMS, QKV, ROTARY_GPT

HEAD = Ending({"embed_out.weight": "lm_head.weight"})
"""The language model head: in every checkpoint, and in the class of the newest releases."""


NETWORK = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
"""Official module of the feed-forward network -> ours."""


def by_head(config, rows):
    """Queries, keys and values of each head side by side."""
    return Split(0, rows, config.num_attention_heads)


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM GPTNeoXModel GPTNeoXForSequenceClassification "
    "GPTNeoXForTokenClassification GPTNeoXForQuestionAnswering",
    structure=ROTARY_GPT,
    fresh={**rotary(10_000.0, 0.25), "hidden_act": "gelu", "residual": "parallel", "norm_eps": 1e-5},
    names=DecoderNames(
        root="gpt_neox.",
        token_head="classifier",
        layer={
            "attention.query_key_value": QKV,
            "attention.dense": "self_attn.o_proj",
            **NETWORK,
            **NORMS,
        },
        outer={"embed_in": "embed_tokens", "final_layer_norm": "norm"},
        spellings=[HEAD],
        split=by_head,
        ignored=[
            "layers.{layer}.attention.bias",
            "layers.{layer}.attention.masked_bias",
            "layers.{layer}.attention.rotary_emb.inv_freq",
        ],
    ),
    settings=DecoderSettings(
        rope=Rope(by_part=True),
        computed=[Flag("use_parallel_residual", "residual", ("sequential", "parallel"))],
    ),
    pad_token_learns=True,
)


# Persimmon (Adept, 2023): a layer norm on queries and keys, squared ReLU, a part of each head turns.
PERSIMMON = Family(
    "persimmon",
    "PersimmonForCausalLM PersimmonModel PersimmonForSequenceClassification PersimmonForTokenClassification",
    structure=ROTARY_GPT,
    fresh={**rotary(25_000.0, 0.5), "hidden_act": "relu2", "qk_norm": True, "norm_eps": 1e-5},
    names=DecoderNames(
        layer={
            "self_attn.query_key_value": QKV,
            "self_attn.dense": "self_attn.o_proj",
            "self_attn.q_layernorm": "self_attn.q_norm",
            "self_attn.k_layernorm": "self_attn.k_norm",
            **NETWORK,
            **NORMS,
        },
        outer={"embed_tokens": "embed_tokens", "final_layernorm": "norm"},
        split=by_head,
    ),
    settings=DecoderSettings(
        rope=Rope(by_part=True),
        computed=[Flag("qk_layernorm", "qk_norm", (False, True))],
    ),
)
