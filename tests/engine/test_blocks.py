"""Attention in blocks of queries is PyTorch's own attention, and only prepared models take it."""

import pytest
import torch
from pairs import assert_as_exact, in_float64, token_ids
from sizes import STRONG
from torch.nn import functional as F

import blockformer
from blockformer.engine import blocks, measure
from blockformer.engine.blocks import attend_in_blocks, can_attend_in_blocks

pytestmark = pytest.mark.portable
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def taken(monkeypatch):
    """All sizes are for blocks, which win on every processor; a list of what they were called with."""
    for name, value in (("_BLOCK", 4), ("_LEAST_WORK", 0), ("_MOST_KEYS", 1 << 20)):
        monkeypatch.setattr(blocks, name, value)
    monkeypatch.setattr(measure, "_verdicts", {**measure._verdicts, "attention in blocks": True})
    calls, attend = [], blocks.attend_in_blocks

    def noted(*arguments):
        calls.append(arguments)
        return attend(*arguments)

    for module in ("attention", "sequences"):
        monkeypatch.setattr(f"blockformer.engine.{module}.attend_in_blocks", noted)
    return calls


def states_of(dtype, batch=2, heads=6, keys=2, length=11, others=None, size=16):
    shapes = ((heads, length), (keys, others or length), (keys, others or length))
    return [torch.randn(batch, *shape, size).to(dtype) for shape in shapes]


def assert_same(found, query, key, value, mask, is_causal, scaling):
    exact = [each.double() for each in (query, key, value)]
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    settings = {"is_causal": is_causal, "scale": scaling, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(*exact, mask, **settings)
    assert (found.shape, found.dtype) == (query.shape, query.dtype)
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= (1e-5 if query.dtype is torch.float32 else 2 * torch.finfo(query.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 2, 6])
@pytest.mark.parametrize("length", [1, 3, 4, 11, 16])
def test_a_causal_text(keys, length, dtype, taken):
    given = states_of(dtype, keys=keys, length=length)
    assert_same(attend_in_blocks(*given, None, 0.3, True), *given, None, True, 0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["none", "hides keys", "hides a triangle", "bias of heads", "bias of a batch"])
@pytest.mark.parametrize(("length", "others"), [(11, 11), (4, 9), (9, 1)])
def test_masks_and_biases(kind, length, others, dtype, taken):
    given = states_of(dtype, length=length, others=others)
    mask = {
        "none": None,
        "hides keys": (torch.arange(others) < torch.tensor([[others], [max(1, others - 3)]]))[:, None, None],
        "hides a triangle": torch.ones(1, 1, length, others, dtype=torch.bool).tril(),
        "bias of heads": torch.randn(1, 6, length, others).to(dtype),
        "bias of a batch": torch.randn(2, 1, 1, others).to(dtype),
    }[kind]
    assert_same(attend_in_blocks(*given, mask, 0.3, False), *given, mask, False, 0.3)


def test_where_it_is_taken(taken, monkeypatch):
    query, key, _ = states_of(torch.bfloat16)
    assert can_attend_in_blocks(query, key)
    assert not can_attend_in_blocks(query.float(), key.float())
    assert not can_attend_in_blocks(query.to("meta"), key.to("meta"))
    assert not can_attend_in_blocks(query[:, :, :1], key)
    assert not can_attend_in_blocks(query.clone().requires_grad_(), key)
    assert not can_attend_in_blocks(query, key.clone().requires_grad_())
    with torch.no_grad():
        assert can_attend_in_blocks(query.clone().requires_grad_(), key)
    with monkeypatch.context() as patch:
        patch.setitem(measure._verdicts, "attention in blocks", False)
        assert not can_attend_in_blocks(query, key)
    with monkeypatch.context() as patch:
        patch.setenv("BLOCKFORMER_FAST", "0")
        assert not can_attend_in_blocks(query, key)
    monkeypatch.setattr(blocks, "_MOST_SCORES", 2 * 6 * 4 * 11 - 1)
    assert not can_attend_in_blocks(query, key)


@pytest.mark.parametrize(("heads", "size", "lengths"), [
    (4, 64, {16: False, 128: False, 256: True, 4096: True}),
    (16, 128, {64: True, 8192: True, 8193: False}),
])  # fmt: skip
def test_the_sizes_that_gain(heads, size, lengths, monkeypatch):
    monkeypatch.setitem(measure._verdicts, "attention in blocks", True)
    for length, gains in lengths.items():
        states = torch.empty(1, heads, 1, size, dtype=torch.bfloat16).expand(-1, -1, length, -1)
        assert can_attend_in_blocks(states, states) == gains, length


def model_of(family, cls, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return cls(blockformer.preset(family, **STRONG)).to(dtype).eval()


@pytest.mark.parametrize(("family", "cls"), [
    ("qwen3", blockformer.BlockformerDecoderForCausalLM), ("gpt2", blockformer.BlockformerDecoderForCausalLM),
    ("bert", blockformer.BlockformerEncoderModel), ("t5", blockformer.BlockformerEncoderDecoderModel),
])  # fmt: skip
@torch.no_grad()
def test_prepared_models_take_it_and_models_as_loaded_do_not(family, cls, taken):
    plain, prepared = (model_of(family, cls) for _ in range(2))
    prepared.prepare_for_inference()
    ids = token_ids(2, 13, vocab=97)
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "t5" else {})}
    expected = plain(**given)[0]
    assert not taken
    found = prepared(**given)[0]
    assert all(arguments[3] is None for arguments in taken)
    assert len(taken) == 2  # the layers' own attention; of T5, whose bias is a mask, that to the encoder
    with in_float64(plain) as wide:
        assert_as_exact(found, expected, wide(**given)[0], times=2)


@torch.no_grad()
def test_a_prompt_in_pieces_is_not_cut(taken):
    prepared = model_of("qwen3", blockformer.BlockformerDecoderForCausalLM).prepare_for_inference()
    ids = token_ids(1, 16, vocab=97)
    prepared(ids)
    assert taken
    taken.clear()
    cache = prepared(ids[:, :1], use_cache=True).past_key_values
    rest = prepared(ids[:, 1:], past_key_values=cache).logits
    assert not taken
    plain = model_of("qwen3", blockformer.BlockformerDecoderForCausalLM)
    with in_float64(plain) as wide:
        assert_as_exact(rest, plain(ids).logits[:, 1:], wide(ids).logits[:, 1:], times=2)
