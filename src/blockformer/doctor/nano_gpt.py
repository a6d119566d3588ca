"""nanoGPT's `ckpt.pt`: GPT-2 with linear layers that are not transposed, an exact GELU, and perhaps no biases."""

from collections.abc import Collection, Sequence
from typing import Any

from blockformer.conversion.rules.operations import Transpose
from blockformer.conversion.rules.table import Rule, module_rules
from blockformer.files.safetensors_io import torch_name

from .own_code import Model, OwnCode, Settings, Tensors

LAYER = "transformer.h.{layer}."
MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
NORMS = ("ln_1", "ln_2")


def _entries(settings: Settings, tensors: Tensors) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu",
        "n_layer": settings["n_layer"],
        "n_head": settings["n_head"],
        "n_embd": settings["n_embd"],
        "n_positions": settings["block_size"],
        "vocab_size": settings["vocab_size"],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        # The code knows no special tokens: GPT-2's, where its tokenizer is used.
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 50256 if settings["vocab_size"] > 50256 else None),
        **{name: float(settings.get("dropout") or 0.0) for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
        "dtype": torch_name(tensors["transformer.wte.weight"].dtype),
    }


def _rules(model: Model, names: Collection[str]) -> Sequence[Rule]:
    same = ("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head", *(LAYER + each for each in NORMS))
    rules = module_rules({name: name for name in same})
    for name in (LAYER + each for each in MATRICES):
        rules += [Rule(f"{name}.bias", f"{name}.bias"), Rule(f"{name}.weight", f"{name}.weight", Transpose())]
    return rules


NANO_GPT = OwnCode(
    name="nanoGPT",
    shows=("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight", "lm_head.weight"),
    key="model_args",
    needs=("n_layer", "n_head", "n_embd", "block_size", "vocab_size"),
    entries=_entries,
    rules=_rules,
    ignored=(f"{LAYER}attn.bias",),
)
