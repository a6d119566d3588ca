"""The growing cache holds what the library's holds, whatever is done to it."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import assert_close, assert_gradients_close, model, token_ids
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from blockformer.engine import growing_cache
from blockformer.engine.growing_cache import GrowingLayer, grow_in_place
from blockformer.model.layer import StackInputs
from blockformer.model.runtime import Runtime


@pytest.fixture(autouse=True)
def no_few(monkeypatch):
    """Small states go into buffers too, as large ones do."""
    monkeypatch.setattr(growing_cache, "_FEW", 0)


def states(length, batch=2):
    return torch.randn(batch, 3, length, 4), torch.randn(batch, 3, length, 4)


def assert_same(ours, theirs):
    assert ours.get_seq_length() == theirs.get_seq_length()
    if theirs.get_seq_length():
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 90)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=4, max_size=4)),
        st.tuples(st.just("crop"), st.integers(0, 40)),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("repeat"), st.integers(2, 3)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 3), min_size=1, max_size=5)),
        st.tuples(st.just("copy"), st.none()),
        st.tuples(st.just("offload"), st.none()),
        st.tuples(st.just("keep"), st.none()),
        st.tuples(st.just("go back"), st.integers(0, 3)),
        st.tuples(st.just("branch"), st.none()),
        st.tuples(st.just("other branch"), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=300, deadline=None)
@given(steps=steps, inference=st.booleans(), rows=st.integers(1, 4))
def test_any_sequence_of_operations_equals_the_dynamic_layer(steps, inference, rows):
    ours, theirs = GrowingLayer(), DynamicLayer()
    kept, branches = [], []  # states that somebody holds, and shallow copies
    with torch.inference_mode(inference), torch.no_grad():
        for name, argument in steps:
            for held, copies, _ in kept:
                assert all(map(torch.equal, held, copies)), "memory that somebody holds was written over"
            batch = theirs.keys.shape[0] if theirs.get_seq_length() else rows
            if name == "update":
                new = states(argument, batch)
                for mine, official in zip(ours.update(*new), theirs.update(*new), strict=True):
                    assert torch.equal(mine, official)
            elif name == "copy":
                ours = copy.deepcopy(ours)
            elif name == "reset":
                ours.reset()
                theirs.reset()
            elif name == "offload":
                ours.offload()
            elif name == "branch":
                branches.append((copy.copy(ours), copy.copy(theirs)))
            elif name == "other branch":
                if argument < len(branches):
                    (ours, theirs), branches[argument] = branches[argument], (ours, theirs)
            elif name == "go back":
                if argument < len(kept):
                    (ours.keys, ours.values), _, (theirs.keys, theirs.values) = kept[argument]
            elif name == "keep":
                if theirs.get_seq_length():
                    held = (ours.keys, ours.values)
                    kept.append((held, [each.clone() for each in held], (theirs.keys, theirs.values)))
            elif theirs.get_seq_length():
                for layer in (ours, theirs):
                    if name == "reorder":
                        beams = (argument * batch)[:batch]
                        layer.reorder_cache(torch.tensor([row % batch for row in beams]))
                    elif name == "crop":
                        layer.crop(-min(argument, layer.get_seq_length() - 1))
                    elif name == "repeat" and batch < 8:
                        layer.batch_repeat_interleave(argument)
                    elif name == "select":
                        layer.batch_select_indices(torch.tensor([row % batch for row in argument]))
            assert_same(ours, theirs)


beam_steps = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 3)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 5), min_size=6, max_size=6)),
        st.tuples(st.just("crop"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 5), min_size=1, max_size=6)),
        st.tuples(st.just("repeat"), st.integers(2, 3)),
    ),
    min_size=4,
    max_size=12,
)


@settings(max_examples=400, deadline=None)
@given(steps=beam_steps, inference=st.booleans())
def test_beams_that_move_end_and_multiply_equal_those_of_the_dynamic_layer(steps, inference):
    """Rows that share their first tokens are not copied; whoever changes the rows by other calls ends the sharing."""
    ours, theirs, beams = GrowingLayer(), DynamicLayer(), torch.zeros(6, dtype=torch.long)
    with torch.inference_mode(inference), torch.no_grad():
        for name, argument in [("update", 5), ("update", 1), ("reorder", [0] * 6), *steps, ("reorder", [1, 0, 3, 2])]:
            rows = theirs.keys.shape[0] if theirs.is_initialized else 4
            if name == "update":
                new = states(argument, rows)
            elif name == "reorder":  # all calls get the same memory, as of a caller who has one buffer for his beams
                beams.resize_(rows).copy_(torch.tensor([row % rows for row in (argument * rows)[:rows]]))
            for layer in (ours, theirs):
                if name == "update":
                    layer.update(*new)
                elif name == "reorder":
                    layer.reorder_cache(beams)
                elif name == "crop":
                    layer.crop(-min(argument, layer.get_seq_length() - 1))
                elif name == "select":
                    layer.batch_select_indices(torch.tensor([row % rows for row in argument]))
                elif rows < 8:
                    layer.batch_repeat_interleave(argument)
            assert_same(ours, theirs)


@torch.no_grad()
def test_one_buffer_of_beams_that_is_rewritten_reorders_two_caches():
    """As a caller's loop does with memory of its own: the second cache gets other beams in the same tensor."""
    pairs, beams = [(GrowingLayer(), DynamicLayer()) for _ in range(2)], torch.tensor([0, 0])
    for pair, wanted in zip(pairs, ([0, 0], [0, 1]), strict=True):
        for new in (states(5), states(1)):
            [layer.update(*new) for layer in pair]
        beams.copy_(torch.tensor(wanted))
        [layer.reorder_cache(beams) for layer in pair]
        assert_same(*pair)
    [layer.reorder_cache(torch.tensor([1, 0])) for layer in pairs[1]]
    assert_same(*pairs[1])


@pytest.mark.parametrize("learner", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_gradients_flow_through_cached_steps_whatever_learns(learner):
    """Attention keeps the keys and values that a query met for its gradient, whether those learn or not."""
    ours, ids = model("qwen3").prepare_for_inference(), token_ids(1, 12)
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(learner in name)
    gradients = []
    for ends in ((12,), (8, 9, 10, 12)):
        seen, start = [], 0
        cache = grow_in_place(DynamicCache(config=ours.config))
        for end in ends:
            seen.append(ours(ids[:, start:end], past_key_values=cache).logits)
            start = end
        (torch.cat(seen, 1) * torch.linspace(-1, 1, seen[0].shape[-1])).sum().backward()
        gradients.append({name: each.grad for name, each in ours.named_parameters() if each.grad is not None})
        ours.zero_grad(set_to_none=True)
    assert gradients[0]
    assert_gradients_close(gradients[1], gradients[0])


@torch.no_grad()
def test_tokens_are_written_in_place():
    layer = GrowingLayer()
    layer.update(*states(10))
    layer.update(*states(1))
    address = layer.keys.data_ptr()
    for _ in range(60):
        layer.update(*states(1))
    assert layer.keys.data_ptr() == address
    assert layer.keys.shape[-2] == 71


@torch.no_grad()
def test_a_branch_that_somebody_keeps_is_not_written_over():
    """Neither the views of a cache nor shallow copies of its layers."""
    decoder = model("qwen3")
    first, second, end = (token_ids(1, length, seed=length, vocab=97) for length in (60, 50, 3))
    cache = decoder.generate(first, max_new_tokens=9, do_sample=False, return_dict_in_generate=True).past_key_values
    kept, copies = [(layer.keys, layer.values) for layer in cache.layers], list(map(copy.copy, cache.layers))
    before = [[each.clone() for each in pair] for pair in kept]
    expected = decoder(end, past_key_values=copy.deepcopy(cache), use_cache=True).logits
    cache.crop(-48)
    decoder(second, past_key_values=cache, use_cache=True)
    for held, (keys, values), layer in zip(kept, before, copies, strict=True):
        for mine, other in zip(held, (layer.keys, layer.values), strict=True):
            assert mine is other
        assert torch.equal(held[0], keys)
        assert torch.equal(held[1], values)
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = keys, values
    assert torch.equal(decoder(end, past_key_values=cache, use_cache=True).logits, expected)
    cache.layers[:] = copies
    assert torch.equal(decoder(end, past_key_values=cache, use_cache=True).logits, expected)


def test_two_shallow_copies_grow_apart():
    layer = GrowingLayer()
    layer.update(*states(10))
    layer.update(*states(1))
    other, (mine, theirs) = copy.copy(layer), (states(3), states(3))
    first, second = layer.update(*mine)[0], other.update(*theirs)[0]
    assert torch.equal(first[..., -3:, :], mine[0])
    assert torch.equal(second[..., -3:, :], theirs[0])


@torch.no_grad()
def test_the_buffer_grows_geometrically():
    layer, addresses = GrowingLayer(), set()
    for _ in range(2000):
        layer.update(*states(1))
        addresses.add(layer._buffers["keys"].data_ptr() if layer._buffers else 0)
    assert len(layer._buffers) == 2
    assert layer._buffers["keys"].shape[-2] < 1.5 * 2000 + 64


@pytest.mark.parametrize("inference", [True, False])
def test_reordered_beams_are_the_library_s(inference):
    """Of two sources with three beams each, in buffers that leave room for the next token."""
    ours, theirs = GrowingLayer(), DynamicLayer()
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode(inference), torch.no_grad():
        for tokens in (10, 1):
            new = states(tokens, batch=6)
            for layer in (ours, theirs):
                layer.update(*new)
        for step in range(40):
            beams = torch.randint(0, 3, (6,), generator=draw) + torch.tensor([0, 0, 0, 3, 3, 3])
            for layer in (ours, theirs):
                layer.reorder_cache(beams.int() if step % 3 == 0 else beams)
            assert_same(ours, theirs)
            address, has_room = ours.keys.data_ptr(), ours._buffers["keys"].shape[-2] > ours.keys.shape[-2]
            new = states(1, batch=6)
            for layer in (ours, theirs):
                layer.update(*new)
            assert_same(ours, theirs)
            assert (ours.keys.data_ptr() == address) == has_room


@pytest.mark.parametrize("inference", [True, False])
def test_rows_that_somebody_reads_are_not_written_over(inference):
    layer, other_way = GrowingLayer(), torch.tensor([1, 0])
    with torch.inference_mode(inference), torch.no_grad():
        layer.update(*states(10))
        layer.update(*states(1))
        held = layer.keys[:, 0]  # a view of it, as somebody might keep one
        kept = held.clone()
        layer.reorder_cache(other_way)
        layer.update(*states(1))
        layer.reorder_cache(other_way)
        assert torch.equal(held, kept)
        assert torch.equal(layer.keys[:, 0, :11], kept)


def written_by_hand(layer):
    layer.keys[1, :, 3] += 1


def cropped_and_filled(layer):
    layer.crop(-6)
    layer.update(*states(9))


def replaced(layer):
    layer.batch_select_indices(torch.tensor([0, 1]))
    layer.values = torch.cat((layer.values[:1], layer.values[1:] + 1))


@pytest.mark.parametrize("change", [written_by_hand, cropped_and_filled, replaced])
@torch.no_grad()
def test_rows_that_somebody_has_changed_are_reordered(change):
    layer = GrowingLayer()
    layer.update(*states(10))
    layer.update(*states(1))
    layer.reorder_cache(torch.tensor([0, 0]))
    layer.update(*states(1))
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.update(*states(1))
    change(layer)
    expected = layer.keys[[1, 0]].clone(), layer.values[[1, 0]].clone()
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.keys, expected[0])
    assert torch.equal(layer.values, expected[1])


def test_a_buffer_made_in_inference_mode_is_left_behind_outside_of_it():
    ours, theirs = GrowingLayer(), DynamicLayer()
    with torch.inference_mode():
        for _ in range(3):
            new = states(5)
            ours.update(*new)
            theirs.update(*new)
    new = states(2)
    with torch.no_grad():
        ours.update(*new)
        theirs.update(*new)
    assert_same(ours, theirs)


def test_gradients_flow_through_a_cache():
    decoder = model("qwen3")
    ids = token_ids(1, 12)
    whole = torch.autograd.grad(decoder(ids).logits[:, 8:].logsumexp(-1).sum(), decoder.lm_head.weight)[0]
    first = decoder(ids[:, :8], use_cache=True)
    rest = decoder(ids[:, 8:], past_key_values=first.past_key_values, use_cache=True)
    split = torch.autograd.grad(rest.logits.logsumexp(-1).sum(), decoder.lm_head.weight)[0]
    assert_close(split, whole)


def test_a_copy_of_a_cache_is_independent():
    decoder = model("qwen3").requires_grad_(False)
    prompt = decoder(token_ids(1, 9), use_cache=True).past_key_values
    decoder(token_ids(1, 1, seed=1), past_key_values=prompt)
    branch = copy.deepcopy(prompt)
    kept = [layer.keys.clone() for layer in prompt.layers]
    decoder(token_ids(1, 3, seed=2), past_key_values=branch)
    for layer, keys in zip(prompt.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_only_plain_layers_of_fresh_dynamic_caches_are_swapped(family):
    decoder = model(family, num_hidden_layers=2).prepare_for_inference().model
    growing = [type(layer) is GrowingLayer for layer in decoder.new_cache().layers]
    assert growing == [family == "qwen3"] * 2
    lazy = grow_in_place(DynamicCache())
    lazy.update(*states(3), layer_idx=0)
    assert type(lazy.layers[0]) is GrowingLayer
    assert grow_in_place(None) is None


def test_an_exporter_sees_keys_and_values_alone_however_the_cache_has_grown():
    """An exported graph takes a cache of any age: the same leaves, in the same tree."""
    exporter = pytest.importorskip("transformers.exporters.exporter_dynamo")
    ours, ids = model("qwen3"), token_ids(2, 9)
    exporter.register_cache_pytrees_for_model(ours)
    with torch.no_grad():
        cache = ours(ids[:, :6], use_cache=True).past_key_values
        young, tree = torch.utils._pytree.tree_flatten(cache)
        for step in (6, 7):
            ours(ids[:, step : step + 1], past_key_values=cache)
        leaves, grown_tree = torch.utils._pytree.tree_flatten(cache)
        assert len(young) == len(leaves) == 2 * ours.config.num_hidden_layers
        assert grown_tree == tree
        rebuilt = torch.utils._pytree.tree_unflatten(leaves, tree)
        assert_close(ours(ids[:, 8:], past_key_values=rebuilt).logits, ours(ids).logits[:, 8:])


@pytest.mark.parametrize("kind", ["dynamic", "both", "static", "window", "eager"])
@pytest.mark.parametrize("hides", [False, True])
def test_the_masks_of_a_step_are_the_library_s(kind, hides):
    """Masks are made by the library except where a step on "sdpa" needs none, and there the library has none either."""
    window = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2} if kind == "window" else {}
    stack = model("qwen3", num_hidden_layers=2, **window).model
    stack.set_attn_implementation("eager" if kind == "eager" else "sdpa")
    cache = StaticCache(stack.config, max_cache_len=16) if kind == "static" else DynamicCache(config=stack.config)
    stack(token_ids(2, 9), past_key_values=cache)
    given = EncoderDecoderCache(cache, DynamicCache()) if kind == "both" else cache
    mask = torch.ones(2, 10, dtype=torch.long) if hides else None
    if hides:
        mask[0, :3] = 0
    asked = dict.fromkeys(StackInputs._fields) | {"hidden_states": torch.zeros(2, 1, stack.config.hidden_size)}
    asked |= {"attention_mask": mask, "past_key_values": given, "position_ids": torch.full((2, 1), 9), "named": {}}
    asked |= {"source": (None, None), "head_masks": (None, None), "places": torch.tensor([9])}
    step = StackInputs(**asked)
    found = stack.runtime.plan(stack, step).masks
    expected = Runtime().plan(stack, step).masks
    assert found.keys() == expected.keys()
    for layer_type, own in expected.items():
        assert (found[layer_type] is None) == (own is None)
        assert own is None or torch.equal(found[layer_type], own)
    assert hides or kind not in ("dynamic", "both") or found == {"full_attention": None}
