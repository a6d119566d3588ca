"""Beams of a prepared encoder-decoder: the library's text, and keys of the source that the beams of a row share."""

import copy
import pickle

import pytest
import torch
from encoder_decoders import modern, source, t5, target
from pairs import assert_close
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from blockformer.engine.beams import CrossLayer
from blockformer.engine.growing_cache import GrowingLayer
from blockformer.model.attention import Attention

WRITES = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
WRITES |= {"output_scores": True}


def prepared(make):
    return make().prepare_for_inference()


@torch.no_grad()
@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("make", [t5, modern])
def test_the_cache_that_beams_leave_has_a_row_for_each(make, prepare):
    """As the library's: whoever goes on from it has an encoder state for each beam too."""
    model, inputs = prepared(make) if prepare else make(), source()
    cache = model.generate(**inputs, **WRITES, num_beams=4).past_key_values
    for layers in (cache.self_attention_cache.layers, cache.cross_attention_cache.layers):
        assert {layer.keys.shape[0] for layer in layers} == {12}
        assert {layer.values.shape[0] for layer in layers} == {12}
    mask = inputs["attention_mask"].repeat_interleave(4, 0)
    states = model.get_encoder()(**inputs).last_hidden_state.repeat_interleave(4, 0)
    with_cross = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
    given = {"encoder_outputs": (states,), "attention_mask": mask, "decoder_input_ids": target(rows=12)}
    assert_close(model(**given, past_key_values=with_cross).logits, model(**given, use_cache=False).logits)


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 3}, {"num_beams": 1}])
@pytest.mark.parametrize("make", [t5, modern])
@torch.no_grad()
def test_shared_sources_give_the_text_and_scores_of_the_plain_model(make, settings):
    plain, quick = make(), prepared(make)
    theirs, ours = (model.generate(**source(), **WRITES, **settings) for model in (plain, quick))
    assert torch.equal(theirs.sequences, ours.sequences)
    assert_close(torch.stack(theirs.scores)[0], torch.stack(ours.scores)[0], 1e-4)
    shared = {layer.beams for layer in ours.past_key_values.cross_attention_cache.layers if type(layer) is CrossLayer}
    assert shared == ({4} if settings["num_beams"] == 4 else set())
    assert {type(layer) for layer in theirs.past_key_values.cross_attention_cache.layers} == {DynamicLayer}
    assert {type(layer) for layer in ours.past_key_values.self_attention_cache.layers} == {GrowingLayer}


@pytest.mark.parametrize("watched", [False, True])
def test_a_source_is_projected_once_a_layer_and_for_each_beam_where_a_hook_looks(watched, monkeypatch):
    model, seen = prepared(t5), []
    rows, project = [], Attention._project_keys_values
    monkeypatch.setattr(
        Attention, "_project_keys_values", lambda part, states: rows.append(len(states)) or project(part, states)
    )
    if watched:
        for layer in model.model.decoder.layers:
            layer.cross_attn.k_proj.register_forward_hook(lambda _, given, output: seen.append(len(output)))
    model.generate(**source(), num_beams=4, max_new_tokens=5, do_sample=False)
    depth = len(model.model.decoder.layers)
    assert rows == ([12] if watched else [3]) * depth
    assert seen == ([12] * depth if watched else [])


@pytest.mark.parametrize("make", [t5, modern])
@torch.no_grad()
def test_attention_that_is_not_the_engine_s_gets_a_row_for_each_beam(make):
    plain, quick = make(), prepared(make)
    for model in (plain, quick):
        model.set_attn_implementation("eager")
    settings = {**WRITES, "num_beams": 3, "output_attentions": True}
    theirs, ours = (model.generate(**source(), **settings) for model in (plain, quick))
    assert torch.equal(theirs.sequences, ours.sequences)
    for one, other in zip(theirs.cross_attentions, ours.cross_attentions, strict=True):
        assert_close(one, other)


def layers():
    """A layer that shares rows of two sources among three beams, and the library's of the same rows."""
    shared, theirs = CrossLayer(3), DynamicLayer()
    keys, values = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    shared.share(keys, values, 3)
    theirs.update(keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0))
    return shared, theirs


CHANGES = {
    "within a source": lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0, 3, 5, 5])),
    "across sources": lambda layer: layer.reorder_cache(torch.tensor([3, 0, 0, 1, 5, 5])),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([5, 1])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "crop": lambda layer: layer.crop(-2),
    "reset": lambda layer: layer.reset(),
    "replaced": lambda layer: setattr(layer, "values", layer.values + 1),
}


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_done_to_a_shared_layer_gives_the_rows_of_the_library_s(change, again):
    shared, theirs = layers()
    shared = again(shared)
    assert shared.beams == 3
    for layer in (shared, theirs):
        CHANGES[change](layer)
    assert shared.beams == (3 if change == "within a source" else 1)
    assert shared.get_seq_length() == theirs.get_seq_length()
    for one, other in ((shared.keys, theirs.keys), (shared.values, theirs.values)):
        assert other is one is None or torch.equal(one, other)
