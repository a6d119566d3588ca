"""GPT-J (Wang and Komatsuzaki, 2021) and CodeGen (Nijkamp et al., 2022): parallel sub-layers that share a norm.

Neighbouring channels of a part of each head turn. CodeGen keeps queries, values and keys, in this order, in one matrix
of four parts.
"""

from typing import Any

from ..rules.operations import Split
from .fields import InnerSize
from .gpt2 import NAMES
from .llama_like import LlamaLikeFamily
from .rope import RotaryPart

FIELDS = {
    **dict.fromkeys(("hidden_size intermediate_size num_hidden_layers num_attention_heads rms_norm_eps").split()),
    **dict.fromkeys(("num_key_value_heads hidden_act max_position_embeddings attention_dropout").split()),
    **NAMES,
}
REST = {
    "ln_1": "self_attn_pre_norm",
    "attn.out_proj": "self_attn.o_proj",
    "mlp.fc_in": "mlp.up_proj",
    "mlp.fc_out": "mlp.down_proj",
}
SETTINGS: dict[str, Any] = {
    "outer": {"wte": "embed_tokens", "ln_f": "norm"},
    "root": "transformer.",
    "layers": "h.{layer}.",
    "head_bias": True,
    "pairs": True,
    "fields": FIELDS,
    "rope": RotaryPart(),
    "computed": [InnerSize("n_inner")],
    "ignored": ["h.{layer}.attn.bias", "h.{layer}.attn.masked_bias", "h.{layer}.attn.causal_mask"],
}
GPTJ = LlamaLikeFamily(
    "gptj",
    "GPTJ",
    layer={**{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"}, **REST},
    **SETTINGS,
)
CODEGEN = LlamaLikeFamily(
    "codegen",
    "CodeGen",
    layer={"attn.qkv_proj": tuple(f"self_attn.{name}_proj" for name in "qvk"), **REST},
    split=lambda config, rows: Split(0, rows, 4),
    **SETTINGS,
)
