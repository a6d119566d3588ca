"""nanochat's `model_<step>.pt` with `meta_<step>.json`, of its first architecture, as a Blockformer model.

A squared ReLU, RMS norms without a factor (also on queries and keys), a norm after the embeddings, a soft cap of the
logits. Its norm of queries and keys comes after the rotation, which changes no length, and its rotation turns the other
way, which exchanges the halves of each head.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from blockformer.conversion.rules.operations import Identity, LastFirst
from blockformer.conversion.rules.table import Rule
from blockformer.files.safetensors_io import torch_name

from .own_code import Model, OwnCode, Settings, Tensors, refuse, said

EMBEDDINGS, HEAD, LAYER = "transformer.wte.weight", "lm_head.weight", "transformer.h.{layer}."
TURNED = {"attn.c_q": "self_attn.q_proj", "attn.c_k": "self_attn.k_proj"}
NAMES = {
    "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
EPSILON = 1.1920928955078125e-07
"""What `torch.nn.functional.rms_norm` adds in float32 by default."""
LATER = {
    r"value_embeds\..*|.*\.ve_gate\..*": "value embeddings",
    r"resid_lambdas|x0_lambdas": "learned factors of the residual stream and of the embeddings in each layer",
    r"smear_gate\..*|smear_lambda": "a share of the token before (smear)",
    r"backout_lambda": "a middle layer's states taken out again (backout)",
}
"""Names of tensors -> what later versions have, and no model here."""
SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "sequence_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
FIXED = {
    "model_type": "blockformer_decoder",
    "architectures": ["BlockformerDecoderForCausalLM"],
    "norm_type": "rms_norm",
    "norm_eps": EPSILON,
    "position_type": "rotary",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "gated_mlp": False,
    "hidden_act": "relu2",
    "qk_norm": True,
    "embedding_norm": True,
    "final_logit_softcapping": 15.0,
    "tie_word_embeddings": False,
}


def _entries(settings: Settings, tensors: Tensors) -> dict[str, Any]:
    lines = [f"it has {what}" for names, what in LATER.items() if any(re.fullmatch(names, each) for each in tensors)]
    windows = settings.get("window_pattern", "L")
    lines += [f"window_pattern is {said(windows)}"] if {*str(windows).upper()} - {"L"} else []
    refuse("nanochat", lines)
    return {
        **FIXED,
        **{theirs: settings[own] for own, theirs in SIZES.items()},
        "vocab_size": tensors[EMBEDDINGS].shape[0],
        "intermediate_size": tensors["transformer.h.0.mlp.c_fc.weight"].shape[0],
        "dtype": torch_name(tensors["transformer.h.0.attn.c_q.weight"].dtype),
    }


def _rules(model: Model, names: Collection[str]) -> Sequence[Rule]:
    size = model.config.head_dim
    modules = {**dict.fromkeys(TURNED, LastFirst(size, size // 2)), **dict.fromkeys(NAMES, Identity())}
    ours = {**TURNED, **NAMES}
    return [
        Rule(EMBEDDINGS, "model.embed_tokens.weight"),
        Rule(HEAD, HEAD),
        *(
            Rule(f"{LAYER}{name}.weight", f"model.layers.{{layer}}.{ours[name]}.weight", op)
            for name, op in modules.items()
        ),
    ]


def _back(model: Model) -> dict[str, Any]:
    return {own: getattr(model.config, theirs) for own, theirs in SIZES.items()}


NANOCHAT = OwnCode(
    name="nanochat",
    shows=(EMBEDDINGS, HEAD, "transformer.h.0.attn.c_q.weight", "transformer.h.0.mlp.c_fc.weight"),
    key="meta_*.json",
    within="model_config",
    needs=tuple(SIZES),
    entries=_entries,
    rules=_rules,
    ignored=("cos", "sin"),
    fills=(("norm.weight", 1.0),),
    families=(None,),
    back=_back,
    file="model_000000.pt",
)
