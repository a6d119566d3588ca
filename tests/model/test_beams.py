"""Beams of an encoder-decoder: one run of the encoder, and cross keys that the beams of a row share."""

import pytest
import torch
from encoder_decoders import modern, source, t5, target
from pairs import assert_close
from transformers import EncoderDecoderCache
from transformers.cache_utils import DynamicCache

from blockformer.engine.growing_cache import GrowingLayer
from blockformer.model.stack import CrossLayer


@torch.no_grad()
@pytest.mark.versions
@pytest.mark.parametrize("make", [t5, modern])
def test_the_cache_that_beams_leave_has_a_row_for_each(make):
    """As the library's: whoever goes on from it has an encoder state for each beam too."""
    model, inputs = make(), source()
    written = model.generate(**inputs, max_new_tokens=5, num_beams=4, do_sample=False, return_dict_in_generate=True)
    cache = written.past_key_values
    for layers in (cache.self_attention_cache.layers, cache.cross_attention_cache.layers):
        assert {layer.keys.shape[0] for layer in layers} == {12}
        assert {layer.values.shape[0] for layer in layers} == {12}
    mask = inputs["attention_mask"].repeat_interleave(4, 0)
    states = model.get_encoder()(**inputs).last_hidden_state.repeat_interleave(4, 0)
    with_cross = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
    given = {"encoder_outputs": (states,), "attention_mask": mask, "decoder_input_ids": target(rows=12)}
    assert_close(model(**given, past_key_values=with_cross).logits, model(**given, use_cache=False).logits)


@pytest.mark.versions
@pytest.mark.parametrize("make", [t5, modern])
def test_the_encoder_runs_once_and_cross_keys_are_projected_once_and_held_once(make):
    model = make()
    calls = {"encoder": 0, "cross": 0, "beams": set(), "cross rows": set(), "self rows": set()}
    model.model.encoder.register_forward_hook(lambda *_: calls.update(encoder=calls["encoder"] + 1))
    for layer in model.model.decoder.layers:
        layer.cross_attn.k_proj.register_forward_hook(lambda *_: calls.update(cross=calls["cross"] + 1))

    def look(module, arguments, keywords, output):
        cache = keywords["past_key_values"]
        calls["cross rows"].add(cache.cross_attention_cache.layers[0].keys.shape[0])
        calls["self rows"].add(cache.self_attention_cache.layers[0].keys.shape[0])
        calls["beams"].add(keywords["input_ids"].shape[0])
        assert {type(layer) for layer in cache.self_attention_cache.layers} == {GrowingLayer}
        assert {type(layer) for layer in cache.cross_attention_cache.layers} == {CrossLayer}

    model.model.decoder.register_forward_hook(look, with_kwargs=True)
    written = model.generate(**source(), max_new_tokens=12, num_beams=4, do_sample=False, num_return_sequences=3)
    assert written.shape[0] == 9
    assert calls == {
        "encoder": 1,
        "cross": len(model.model.decoder.layers),
        "beams": {12},
        "cross rows": {3},
        "self rows": {12},
    }
