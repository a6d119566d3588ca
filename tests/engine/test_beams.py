"""Beams of a prepared encoder-decoder: the library's text, and keys of the source that its beams share."""

import pytest
import torch
from encoder_decoders import modern, source, t5, target
from pairs import assert_close
from transformers import DynamicCache, EncoderDecoderCache

from blockformer.model.attention import Attention

pytestmark = pytest.mark.versions

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


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3, "early_stopping": True},
        {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {"num_return_sequences": 3, "do_sample": True},
    ],
)
@pytest.mark.parametrize("make", [t5, modern])
def test_shared_sources_give_the_text_of_the_plain_model(make, settings, hooked):
    """Also where a layer had a hook when the model was prepared, and so cannot share."""
    plain, quick = make(), make()
    handle = quick.model.decoder.layers[0].cross_attn.register_forward_hook(lambda *given: None) if hooked else None
    quick.prepare_for_inference()
    if handle is not None:
        handle.remove()
    texts = []
    for model in (plain, quick):
        torch.manual_seed(0)
        texts.append(model.generate(**source(), **{"max_new_tokens": 20, "do_sample": False, **settings}))
    assert torch.equal(*texts)
    assert not quick.runtime.decoding.fallbacks.reasons


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
