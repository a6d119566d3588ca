"""GPT-J (Wang and Komatsuzaki, 2021) and CodeGen (Nijkamp et al., 2022): parallel sub-layers that share a norm.

Neighbouring channels of a part of each head turn. CodeGen keeps queries, values and keys, in this order, in one matrix
of four parts.
"""

from typing import Any

from ..rules.operations import Split
from ..values import InnerSize, RotaryPart
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .gpt2 import MASKS
from .shared import READ_TYPED, ROTARY_GPT, TYPED

STRUCTURE = {
    **ROTARY_GPT,
    "residual": "parallel_shared_norm",
    "attention_bias": False,
    "attention_output_bias": False,
    "lm_head_bias": True,
}
FRESH = {**TYPED, **rotary(10_000.0, 0.5), "hidden_act": "gelu_new", "norm_eps": 1e-5}
REST = {
    "ln_1": "self_attn_pre_norm",
    "attn.out_proj": "self_attn.o_proj",
    "mlp.fc_in": "mlp.up_proj",
    "mlp.fc_out": "mlp.down_proj",
}
NAMES: dict[str, Any] = {
    "outer": {"wte": "embed_tokens", "ln_f": "norm"},
    "root": "transformer.",
    "layers": "h.{layer}.",
    "head_bias": True,
    "pairs": True,
    "ignored": [*MASKS, "h.{layer}.attn.causal_mask"],
}
SETTINGS = DecoderSettings(rope=RotaryPart(), computed=[InnerSize("n_inner"), READ_TYPED])
GPTJ = Family(
    "gptj",
    "GPTJForCausalLM GPTJModel GPTJForSequenceClassification GPTJForQuestionAnswering",
    structure=STRUCTURE,
    fresh=FRESH,
    names=DecoderNames(
        layer={
            "attn.q_proj": "self_attn.q_proj",
            "attn.k_proj": "self_attn.k_proj",
            "attn.v_proj": "self_attn.v_proj",
            **REST,
        },
        **NAMES,
    ),
    settings=SETTINGS,
    pad_token_learns=True,
)
CODEGEN = Family(
    "codegen",
    "CodeGenForCausalLM CodeGenModel",
    structure=STRUCTURE,
    fresh=FRESH,
    names=DecoderNames(
        layer={"attn.qkv_proj": ("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj"), **REST},
        split=lambda config, rows: Split(0, rows, 4),
        **NAMES,
    ),
    settings=SETTINGS,
    pad_token_learns=True,
)
