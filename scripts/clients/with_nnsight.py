"""nnsight: states read and changed inside a model. Usage: python with_nnsight.py MODELS"""

import transformers
from nnsight import LanguageModel
from shared import TEXTS, TRUST, compare


def run(folder: str) -> list:
    """The states behind the first layer, and the logits when half of them is taken away."""
    model = LanguageModel(
        transformers.AutoModelForCausalLM.from_pretrained(folder, **TRUST),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    )
    with model.trace(TEXTS[1]):
        layer = model.model.layers[0]
        states = layer.output[0].save() if isinstance(layer.output, tuple) else layer.output.save()
        layer.output[:] = layer.output * 0.5
        logits = model.lm_head.output.save()
    return [states.detach(), logits.detach()]


if __name__ == "__main__":
    compare("nnsight", "read and change states", "qwen3", run)
