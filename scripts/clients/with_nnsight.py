"""nnsight: states read and changed inside a model. Usage: python with_nnsight.py MODELS"""

import torch
import transformers
from nnsight import TransformersModel
from shared import TEXTS, TRUST, compare


def load(folder: str):
    """A model in nnsight's hands, with eager attention, which gives its probabilities."""
    return TransformersModel(
        transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **TRUST),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        task="text-generation",
    )


@torch.no_grad()
def seen(folder: str) -> list:
    """The residual stream behind each layer, each head's output and attention, and the logits."""
    model, found = load(folder), []
    with model.trace(TEXTS[1]):
        found = list().save()  # noqa: C408
        for layer in model.model.layers:
            found.append(layer.self_attn.o_proj.input)
            found.append(layer.self_attn.output[1])
            found.append(layer.output)
        found.append(model.lm_head.output)
    return [each.detach() for each in found]


@torch.no_grad()
def changed(folder: str) -> list:
    """The logits without a head of the first layer, and those with half of the states behind it."""
    model = load(folder)
    with model.trace(TEXTS[1]):
        model.model.layers[0].self_attn.o_proj.input[..., 16:32] = 0.0
        without = model.lm_head.output.save()
    with model.trace(TEXTS[1]):
        model.model.layers[0].output[:] = model.model.layers[0].output * 0.5
        halved = model.lm_head.output.save()
    return [without.detach(), halved.detach()]


if __name__ == "__main__":
    for name in ("qwen3", "llama"):
        compare("nnsight", "residual stream, heads, patterns", name, seen)
        compare("nnsight", "states and heads changed", name, changed)
