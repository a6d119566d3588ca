"""The arguments of a job of `test_hub.py`, and the models that it publishes."""

import json
import sys

import torch

arguments = json.loads(sys.argv[1])
folder, sizes, ids, token = (arguments.get(name) for name in ("folder", "sizes", "ids", "token"))


def make(seed):
    # A model with other weights for another seed.
    import blockformer  # out of reach of jobs that load what others have published

    torch.manual_seed(seed)
    return blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **sizes)).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits
