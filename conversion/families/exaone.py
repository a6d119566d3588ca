"""EXAONE 3 and 3.5 (LG AI Research, 2024): Llama's classes with another config; files have names of its own code."""

from ..storage.spelling import Parts
from .base import Family
from .decoder import DecoderNames
from .fresh import rotary
from .shared import LLAMA

IN_FILES = Parts(
    {
        "transformer.h.": "model.layers.",
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        ".attn.attention.": ".self_attn.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".mlp.c_fc_0.": ".mlp.gate_proj.",
        ".mlp.c_fc_1.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    }
)
FAMILY = Family(
    "exaone",
    "LlamaForCausalLM LlamaModel",
    config_class="ExaoneConfig",
    structure=LLAMA,
    fresh={**rotary(500_000.0), "norm_eps": 1e-5},
    names=DecoderNames(
        spellings=[IN_FILES],
        former_classes={"ExaoneForCausalLM": "LlamaForCausalLM", "ExaoneModel": "LlamaModel"},
    ),
)
