"""What two models give that must be the same: numbers at real tokens, and text, however it is written."""

import torch
from pairs import assert_close

OF_OURS = {"sop_logits": "seq_relationship_logits"}  # ALBERT's name of the same head
WAYS_TO_WRITE = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.5, "top_k": 40},
    {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2},
    {"num_beams": 4, "do_sample": False, "num_return_sequences": 2},
)


def padded(rows, side, vocab=97, length=20):
    """Rows of real tokens, the second one padded with 0 on a side; positions counted from 0 at the first real token."""
    ids = torch.randint(5, vocab, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    gap = slice(0, 7) if side == "left" else slice(length - 7, length)
    ids[1, gap], mask[1, gap] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@torch.no_grad()
def assert_same_outputs(ours, theirs, given, official=None, *, spread, row_terms=0.0):
    """Both models give the same outputs, all of them: at real tokens, or for whole rows.

    Args:
        ours: a model.
        theirs: the official one.
        given: what both read. A token of a target is real if there is no `decoder_attention_mask`.
        official: what the official one reads, if that is something else.
        spread: the least deviation of an output; numbers that are all alike would show little.
        row_terms: the size of the terms that an output of a row is a sum of, if they may cancel. Its deviation may then
            be anything, and only rows whose first token is real are compared: that is where they are read.
    """
    found, expected = ours(**given), theirs(**(given if official is None else official))
    source = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    real = source
    if "decoder_input_ids" in given:
        real = given.get("decoder_attention_mask", torch.ones_like(given["decoder_input_ids"])).bool()
    # The cache, by the name of 5.24 too; the states are T5Gemma's, which gives them unasked.
    left = {"past_key_values", "cache", "decoder_hidden_states"}
    if getattr(ours.config, "is_decoder", False):  # ours has no pooler there
        left.add("pooler_output")
    names = {OF_OURS.get(name, name): name for name in expected if name not in left}
    assert names
    assert set(found) - left == set(names)
    for name, official_name in names.items():
        pair = found[name], expected[official_name]
        if name == "encoder_last_hidden_state":
            assert_close(pair[0][source], pair[1][source])
        elif pair[1].shape[: real.dim()] == real.shape:
            assert_close(pair[0][real], pair[1][real])
            assert pair[1][real].std() > spread, name
        elif row_terms:
            rows = source[..., 0]
            assert_close(pair[0][rows], pair[1][rows], at_least=row_terms)
        else:
            assert_close(*pair)
            assert name == "pooler_output" or pair[1].std() > spread, name


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
