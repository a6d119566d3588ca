"""What two models give that must be the same: numbers at real tokens, and text, however it is written."""

import torch
from pairs import assert_close

WAYS_TO_WRITE = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.5, "top_k": 40},
    {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2},
    {"num_beams": 4, "do_sample": False, "num_return_sequences": 2},
)


def count_same_at(mask, found, expected, spread, tolerance=1e-5):
    """How many outputs there are, if all are the same: at the real tokens of a mask [B, T], or of whole rows.

    Each has a deviation above `spread`; numbers that are all alike would show little.
    """
    kinds = "last_hidden_state logits start_logits end_logits prediction_logits seq_relationship_logits".split()
    names = {name: name for name in kinds if name in expected}
    if "sop_logits" in expected:  # ALBERT's name of the same head
        names["seq_relationship_logits"] = "sop_logits"
    for name, official in names.items():
        pair = (found[name], expected[official])
        if pair[0].shape[:2] == mask.shape:
            pair = tuple(tensor[mask] for tensor in pair)
        assert_close(*pair, tolerance)
        assert pair[1].std() > spread
    return len(names)


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
