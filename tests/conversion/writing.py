"""Text of two models that must be the same, however it is written."""

import torch

WAYS_TO_WRITE = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.5, "top_k": 40},
    {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2},
    {"num_beams": 4, "do_sample": False, "num_return_sequences": 2},
)


def same_text(ours, theirs, **settings):
    """What both write, sampled from one seed, if it is the same."""
    texts = []
    for model in (ours, theirs):
        torch.manual_seed(5)
        texts.append(model.generate(**settings))
    assert torch.equal(*texts), settings
    return texts[0]


@torch.no_grad()
def nudged(model):
    """The model, changed in place so little that it mostly guesses what it would have written: an assistant."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.01)
    return model
