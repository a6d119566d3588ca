"""Persimmon (Adept, 2023): a layer norm on queries and keys, squared ReLU, a part of each head turns."""

from ..values import Flag, Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .gpt_neox import by_head
from .shared import NORMS, QKV, ROTARY_GPT

FAMILY = Family(
    "persimmon",
    "PersimmonConfig",
    "PersimmonForCausalLM PersimmonModel PersimmonForSequenceClassification PersimmonForTokenClassification",
    structure=ROTARY_GPT,
    fresh={**rotary(25_000.0, 0.5), "hidden_act": "relu2", "qk_norm": True, "norm_eps": 1e-5},
    names=DecoderNames(
        layer={
            "self_attn.query_key_value": QKV,
            "self_attn.dense": "self_attn.o_proj",
            "self_attn.q_layernorm": "self_attn.q_norm",
            "self_attn.k_layernorm": "self_attn.k_norm",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
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
