"""TransformerLens: what its hooks see and change, with the adapter of examples/look_inside.py. Usage: ... MODELS

Its own adapters for the official classes are compared.
"""

import sys
from pathlib import Path

import torch
import transformers
from shared import TEXTS, TRUST, compare
from transformer_lens.model_bridge import TransformerBridge

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from look_inside import bridge

AUTO = {"bert": transformers.AutoModelForMaskedLM}


def boot(folder: str):
    """The bridge of a repo of ours, or of an official checkpoint as TransformerLens makes it."""
    if folder.endswith("-official"):
        return TransformerBridge.boot_transformers(folder, device="cpu")
    auto = AUTO.get(Path(folder).name, transformers.AutoModelForCausalLM)
    return bridge(auto.from_pretrained(folder, **TRUST))


def tokens_of(folder: str):
    """A text as tokens [1, T]."""
    return transformers.AutoTokenizer.from_pretrained(folder)(TEXTS[1], return_tensors="pt")["input_ids"]


@torch.no_grad()
def seen(folder: str) -> list:
    """The residual stream, each head's output and attention, and the logits."""
    model = boot(folder)
    logits, cache = model.run_with_cache(tokens_of(folder))
    names = ("hook_resid_pre", "hook_resid_post", "attn.hook_z", "attn.hook_pattern")
    return [logits, *(cache[f"blocks.{layer}.{name}"] for layer in range(model.cfg.n_layers) for name in names)]


@torch.no_grad()
def without_a_head(folder: str) -> list:
    """The logits when a head of the first layer is taken out."""

    def take_out(heads, hook):
        heads[:, :, 1] = 0.0
        return heads

    return [boot(folder).run_with_hooks(tokens_of(folder), fwd_hooks=[("blocks.0.attn.hook_z", take_out)])]


if __name__ == "__main__":
    for name in ("qwen3", "llama", "gpt2", "bert"):
        compare("transformer-lens", "residual stream, heads, patterns", name, seen)
    for name in ("qwen3", "gpt2"):
        compare("transformer-lens", "logits without a head", name, without_a_head)
