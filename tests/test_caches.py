"""Caches that are kept elsewhere or in few bits: the text of transformers' model with the same cache, or a refusal."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import transformers
from encoder_decoders import t5_pair
from packaging.version import Version
from pairs import assert_close, latent_pair, left_padded, pair, token_ids
from sizes import STRONG
from transformers import BertConfig, BertModel, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, QuantizedCache, QuantizedLayer

import blockformer
from blockformer import preset

pytestmark = pytest.mark.versions

STEPS = 16
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Ours and transformers' by name, with the same weights."""
    return {
        "decoder": pair(),
        "windows": pair(**MIXED),
        "latent": latent_pair(tmp_path_factory.mktemp("latent")),
        "encoder-decoder": t5_pair(tmp_path_factory.mktemp("t5")),
    }


def text_of(a_model, rows=3, steps=STEPS, **settings):
    ids, mask = left_padded(rows, 9)
    if a_model.config.is_encoder_decoder:
        ids, mask = ids.flip(1), mask.flip(1)
    settings = {"attention_mask": mask, "max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False} | settings
    return a_model.generate(ids, **settings)


def assert_same_text(ours, theirs, **settings):
    written = text_of(ours, **settings)
    assert torch.equal(written, text_of(theirs, **settings))
    assert len(torch.unique(written[:, -STEPS:], dim=0)) == len(written), "rows that say the same prove little"
    return written


def forbid_layers(monkeypatch, a_model):
    """Make every product of the decoder's an error."""
    for module in a_model.get_decoder().modules():
        if isinstance(module, torch.nn.Linear):
            monkeypatch.setattr(module, "forward", None)


class NoStream(nullcontext):
    """Stands in for a stream of an accelerator: here everything happens in turn."""

    def __init__(self, *arguments):
        super().__init__()

    def wait_stream(self, stream):
        pass


@pytest.fixture
def moves(monkeypatch):
    """A processor whose memory counts for two: what is moved lies elsewhere, and its old place holds NaN."""
    count = Counter()

    def move(name):
        def moved(layer):
            if not layer.is_initialized:
                return
            count[name] += 1
            for part in ("keys", "values"):
                held = getattr(layer, part)
                setattr(layer, part, held.clone())
                if name == "prefetch":  # before that, attention still reads what `update` gave it
                    held.fill_(torch.nan)

        return moved

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", NoStream)
    monkeypatch.setattr(torch, "Stream", NoStream)
    for name in ("offload", "prefetch"):
        monkeypatch.setattr(CacheLayerMixin, name, move(name))
    return count


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("name", ["decoder", "windows", "latent", "encoder-decoder"])
def test_an_offloaded_cache_gives_the_same_text(models, moves, name, implementation, settings):
    ours, theirs = models[name]
    written = assert_same_text(ours, theirs, cache_implementation=implementation, **settings)
    assert torch.equal(written, text_of(ours, **settings))
    assert moves["offload"] >= STEPS
    assert moves["prefetch"] >= STEPS


def test_a_prepared_model_offloads_its_cache_too(models, moves):
    ours, theirs = pair()
    expected = text_of(theirs)
    ours.prepare_for_inference()
    assert torch.equal(text_of(ours, cache_implementation="offloaded"), expected)
    assert moves["offload"] >= STEPS


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_without_an_accelerator_an_offloaded_cache_is_refused_before_any_layer_runs(
    models, monkeypatch, name, implementation
):
    ours, _ = models[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch, "Stream", NoStream)
    forbid_layers(monkeypatch, ours)
    with pytest.raises(ValueError, match="an offloaded cache needs a CUDA device"):
        text_of(ours, cache_implementation=implementation)
    cache = DynamicCache(config=ours.config, offloading=True)
    cache = EncoderDecoderCache(cache, DynamicCache()) if ours.config.is_encoder_decoder else cache
    with pytest.raises(ValueError, match="an offloaded cache needs a CUDA device"):
        ours(token_ids(1, 4), past_key_values=cache, **_target(ours))


def _target(a_model):
    return {"decoder_input_ids": token_ids(1, 2)} if a_model.config.is_encoder_decoder else {}


class FewSteps(QuantizedLayer):
    """A backend of the quantized cache that needs no package: 15 steps from the smallest to the largest of a group."""

    def _quantize(self, tensor, axis):
        lowest, highest = tensor.aminmax(dim=-1, keepdim=True)
        step = (highest - lowest).clamp(min=1e-6) / 15
        return ((tensor - lowest) / step).round(), lowest, step

    def _dequantize(self, held):
        steps, lowest, step = held
        return steps * step + lowest


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr("transformers.cache_utils.QuantoQuantizedLayer", FewSteps)
    return {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "residual_length": 4}}


@pytest.mark.parametrize("name", ["decoder", "latent"])
def test_a_quantized_cache_gives_the_text_of_transformers(models, few_steps, name):
    ours, theirs = models[name]
    if name == "latent" and theirs(token_ids(1, 2), use_cache=True).past_key_values.layers[0].keys.shape[1] > 1:
        pytest.skip(f"transformers {transformers.__version__} caches the keys and values of all heads")
    written = assert_same_text(ours, theirs, **few_steps)
    assert not torch.equal(written, text_of(ours)), "so few steps that the text is another one"
    out = text_of(ours, return_dict_in_generate=True, **few_steps)
    assert type(out.past_key_values) is QuantizedCache
    assert {type(layer) for layer in out.past_key_values.layers} == {FewSteps}


@pytest.mark.timeout(1200)
def test_compiled_steps_step_aside_for_a_quantized_cache(models, few_steps):
    ours, _ = pair()
    expected = text_of(ours, **few_steps)
    ours.prepare_for_inference(compile=True)
    assert torch.equal(text_of(ours, **few_steps), expected)


@pytest.mark.parametrize("name", ["windows", "encoder-decoder"])
def test_a_quantized_cache_is_refused_where_transformers_has_none(models, few_steps, monkeypatch, name):
    if name == "windows" and Version(transformers.__version__) < Version("5.11"):
        pytest.skip("transformers 5.5.0 and 5.10.4 take a quantized cache for windows, too")
    ours, theirs = models[name]
    messages = []
    for a_model in (ours, theirs):
        forbid_layers(monkeypatch, a_model)
        with pytest.raises(ValueError, match=r"layer types|quantized cache") as refused:
            text_of(a_model, **few_steps)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["decoder", "windows"])
def test_a_mask_may_cover_all_the_room_of_a_static_cache(models, name):
    logits = []
    for model in models[name]:
        cache, mask = StaticCache(model.config, max_cache_len=16), (torch.arange(16) < 6).long()[None]
        with torch.no_grad():
            model(token_ids(1, 5), past_key_values=cache)
            logits.append(model(token_ids(1, 1, seed=1), attention_mask=mask, past_key_values=cache).logits)
    assert_close(*logits)


@pytest.mark.parametrize("name", ["decoder", "windows", "learned", "by token"])
@torch.no_grad()
def test_such_a_mask_may_show_room_that_is_still_empty(models, name):
    """The tokens have the positions that they have with a mask of their own length, behind padding too."""
    ours, theirs = models.get(name, (None, None))
    if theirs is None:
        fields = {"position_offset": 2, "padding_position": "by_token"} if name == "by token" else {}
        ours = blockformer.BlockformerDecoderForCausalLM(preset("gpt2", **STRONG, **fields)).eval()
    for padding in (0, 2):
        whole = torch.ones(2, 16, dtype=torch.long)
        whole[1, :padding] = 0
        logits = []
        for one, is_whole in ((ours, False), (ours, True), (theirs, True))[: 2 if theirs is None else 3]:
            cache, parts = StaticCache(one.config, max_cache_len=16), []
            for start, length in ((0, 5), (5, 1), (6, 3)):
                ids, mask = token_ids(2, 9, vocab=96)[:, start : start + length], whole[:, : start + length]
                parts.append(one(ids, attention_mask=whole if is_whole else mask, past_key_values=cache).logits)
            logits.append(torch.cat(parts, 1)[:, padding:])
        for found in logits[1:]:
            assert_close(found, logits[0])


def test_an_encoder_writes_no_text():
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ours = blockformer.BlockformerEncoderModel(preset("bert", **sizes, intermediate_size=64))
    theirs = BertModel(BertConfig(**sizes, intermediate_size=64))
    for a_model in (ours, theirs):
        assert not a_model.can_generate()
        with pytest.raises(AttributeError, match="generate"):
            a_model.generate(token_ids(1, 4, vocab=99))
