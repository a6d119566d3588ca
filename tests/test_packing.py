"""Padding skipped: the packed run gives what the padded run gives, in results and in gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import assert_close, model, token_ids

from blockformer import BlockformerDecoderModel
from blockformer.packing import Packing, find_packing, packed_mask

POSITION_TYPES = (
    "rotary",
    "learned",
    "sinusoidal",
    "sinusoidal_halves",
    "relative_bias",
    "relative_key",
    "relative_key_query",
    "none",
)


def masked(lengths, length, side="right"):
    """A mask [B, length] of 0 and 1 with so many ones in each row."""
    places = torch.arange(length)
    if side == "left":
        places = length - 1 - places
    return (places[None] < torch.tensor(lengths)[:, None]).long()


def both(ours, monkeypatch, *arguments, **keywords):
    """The packed and the padded result."""
    monkeypatch.setenv("BLOCKFORMER_FAST", "1")
    packed = ours(*arguments, **keywords)
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    return packed, ours(*arguments, **keywords)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("position_type", POSITION_TYPES)
def test_results_and_gradients_are_those_of_the_padded_run(position_type, side, monkeypatch):
    rope = {} if position_type == "rotary" else {"rope_parameters": None}
    ours = model("qwen3", cls=BlockformerDecoderModel, position_type=position_type, **rope)
    mask = masked([12, 5, 1, 9], 12, side)
    ids, real = token_ids(4, 12), mask.bool()
    packed, padded = both(ours, monkeypatch, ids, mask, use_cache=False)
    assert_close(packed.last_hidden_state[real], padded.last_hidden_state[real])
    assert not packed.last_hidden_state[~real].any()
    gradients = []
    for outputs in (packed, padded):
        loss = outputs.last_hidden_state[real].square().mean()
        gradients.append(torch.autograd.grad(loss, list(ours.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)


def test_no_layer_works_on_padding():
    ours, seen = model("qwen3", cls=BlockformerDecoderModel), []
    ours.layers[1].mlp.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape))
    ours(token_ids(3, 10), masked([10, 2, 5], 10), use_cache=False)
    assert seen == [(1, 17, 64)]


@pytest.mark.parametrize(
    "keywords",
    [{"use_cache": True}, {"use_cache": False, "output_hidden_states": True}],
)
def test_the_padded_form_is_kept_where_the_caller_sees_it(keywords):
    ours, seen = model("qwen3", cls=BlockformerDecoderModel), []
    ours.layers[1].mlp.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape))
    ours(token_ids(3, 10), masked([10, 2, 5], 10), **keywords)
    assert seen == [(3, 10, 64)]


@pytest.mark.parametrize(
    ("mask", "packs"),
    [
        ([[1, 1, 1], [1, 1, 1]], False),
        ([[0, 0, 0], [0, 0, 0]], False),
        ([[1, 1, 0], [1, 1, 1]], True),
        ([[0, 1, 1], [1, 1, 0]], True),
        ([[0, 1, 0], [0, 0, 0]], True),
        ([[1, 0, 1], [1, 1, 1]], False),
    ],
)
def test_when_a_mask_is_packed(mask, packs):
    assert (Packing.of_mask(torch.tensor(mask)) is not None) == packs


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5), left=st.booleans())
def test_unpack_undoes_pack(lengths, left):
    mask = masked(lengths, 7, "left" if left else "right")
    packing = Packing.of_mask(mask)
    if packing is None:
        assert set(lengths) in ({0}, {7})
        return
    states = torch.randn(len(lengths), 7, 3)
    packed = packing.pack(states)
    assert packed.shape == (1, sum(lengths), 3)
    assert torch.equal(packing.unpack(packed), states * mask[..., None])
    assert [part.shape[2] for part in packing.split(packed[:, None])] == lengths


def test_rows_of_several_sequences():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert Packing.of_positions(positions).lengths == [3, 2, 5]
    assert Packing.of_positions(torch.arange(4)[None]) is None
    visible = packed_mask(positions)[0, 0]
    assert visible[:3, :3].all()
    assert visible[3:, 3:].all()
    assert not visible[:3, 3:].any()
    assert not visible[3:, :3].any()


def test_only_where_the_result_is_the_same():
    config, mask = model("qwen3").config, masked([2, 4], 4)
    assert find_packing(config, mask, None, is_causal=True) is not None
    assert find_packing(config, mask[:, None, None], None, is_causal=True) is None
    config._attn_implementation = "eager"
    assert find_packing(config, mask, None, is_causal=True) is None
    assert find_packing(model("mistral").config, mask, None, is_causal=True) is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_left_on_padding_never_count(side):
    ours = model("qwen3")
    mask, ids = masked([10, 2, 5], 10, side), token_ids(3, 10)
    expected = ours(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    for training in (True, False):
        assert_close(ours.train(training)(ids, attention_mask=mask, labels=ids).loss, expected)


def test_training_skips_padding_too(monkeypatch):
    ours = model("qwen3").train()
    mask = masked([10, 2, 5], 10)
    ids = token_ids(3, 10)
    labels = ids.masked_fill(mask == 0, -100)
    packed, padded = both(ours, monkeypatch, ids, attention_mask=mask, labels=labels)
    assert packed.past_key_values is None
    assert_close(packed.loss, padded.loss)
