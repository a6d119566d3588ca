"""Beam search in the loop that writes, uncompiled, next to the library's: texts and scores."""

import copy

import pytest
import torch
from test_decoding import make, prompts, with_loop
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import blockformer
from blockformer.engine import graphs, search
from blockformer.engine.search import BeamSearch

ENDS = [*range(2, 9)]


class Falls(StoppingCriteria):
    """A text ends with a token of a smaller id than the one before."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] < input_ids[:, -2]


FALLS = StoppingCriteriaList([Falls()])
SETTINGS = {
    "plain": {},
    "several ends": {"eos_token_id": ENDS},
    "all of them": {"eos_token_id": ENDS, "num_return_sequences": 3},
    "long": {"eos_token_id": ENDS, "length_penalty": 2.0, "num_return_sequences": 2},
    "short": {"eos_token_id": ENDS, "length_penalty": -1.0, "num_return_sequences": 2},
    "early": {"eos_token_id": ENDS, "early_stopping": True, "num_return_sequences": 3},
    "never": {"eos_token_id": ENDS, "early_stopping": "never", "num_return_sequences": 2},
    "never, short": {"eos_token_id": ENDS, "early_stopping": "never", "length_penalty": -0.5},
    "no end": {"eos_token_id": None},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 2},
    "least length": {"eos_token_id": ENDS, "min_length": 8},
    "least new tokens": {"eos_token_id": ENDS, "min_new_tokens": 8},
    "end of none": {"eos_token_id": [*ENDS, 50256], "min_new_tokens": 6, "min_length": 8, "pad_token_id": 0},
    "negative ends": {"eos_token_id": [*range(-60, 0)], "min_length": 8},
    "forbidden": {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [11]], "eos_token_id": ENDS},
    "forbidden pairs": {"bad_words_ids": [[5], [8, 9], [12, 13, 14]]},
    "suppressed": {"suppress_tokens": [9, 10], "begin_suppress_tokens": [11]},
    "other scores": {"repetition_penalty": 1.4, "eos_token_id": ENDS},
    "by length": {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": ENDS},
    "of one token": {"max_new_tokens": 1},
    "own end": {"stopping_criteria": FALLS, "num_return_sequences": 2},
    "own end and others": {"stopping_criteria": FALLS, "eos_token_id": ENDS, "early_stopping": True},
    "own end, later": {"stopping_criteria": FALLS, "min_new_tokens": 6, "repetition_penalty": 1.4},
}


@pytest.fixture
def searches(monkeypatch):
    """Every search of ours, in order."""
    found, written = [], BeamSearch.written
    monkeypatch.setattr(BeamSearch, "written", lambda self: found.append(self) or written(self))
    return found


def assert_as_library(pair, searches, **settings):
    plain, quick = pair
    given = {"max_new_tokens": 12, "do_sample": False, "num_beams": 4, **settings}
    expected = plain.generate(**given, return_dict_in_generate=True, output_scores=True)
    text = quick.generate(**given)
    assert torch.equal(text, expected.sequences), settings
    search = searches.pop()
    scores = search.scores[:, : given.get("num_return_sequences", 1)].flatten()
    torch.testing.assert_close(scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
    assert not searches
    assert not quick.runtime.decoding.fallbacks.reasons
    return search, text


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v3", "bloom", "qwen3_5_text", "lfm2", "t5", "marian"])
def test_texts_and_scores_are_the_library_s(name, searches):
    pair = make(name)
    assert_as_library(pair, searches, **prompts([5, 3, 6]), eos_token_id=ENDS, num_return_sequences=2)
    assert_as_library(pair, searches, **prompts([6]), num_beams=2, max_new_tokens=24, eos_token_id=None)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["qwen3", "marian"])
def test_settings_are_the_library_s(name, settings, searches):
    assert_as_library(make(name), searches, **prompts([5, 8, 3]), **settings)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "t5", "marian"])
def test_a_cpu_searches_by_its_compiled_steps(name, searches, untraced):
    plain, quick = make(name)[0], make(name)[0].prepare_for_inference(compile=True)
    for lengths, way in (([7], "all of them"), ([5, 3], "forbidden"), ([4, 6, 2], "other scores")):
        assert_as_library((plain, quick), searches, **prompts(lengths), **SETTINGS[way])
    assert not quick.runtime.decoding.fallbacks.reasons
    shared = 4 if plain.config.is_encoder_decoder else 1  # a decoder's beams are rows like others
    assert {beams for _, beams in quick.runtime.decoding.steps._functions} == {shared}
    with torch.inference_mode():
        given = {**prompts([5, 3]), "num_beams": 4, "max_new_tokens": 9, "do_sample": False}
        assert torch.equal(quick.generate(**given), plain.generate(**given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_scores_are_float32_whatever_the_default_dtype_is(dtype, searches):
    """Half precision cannot hold the score of a beam that is not to be chosen."""
    pair = make("qwen3")
    torch.set_default_dtype(dtype)
    try:
        search, _ = assert_as_library(pair, searches, **prompts([5, 8]), **SETTINGS["early"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert search.scores.dtype is torch.float32


def test_a_decoder_reads_its_prompt_once_for_all_beams(searches):
    _, quick = make("qwen3")
    rows = []
    embed = type(quick.model)._embed_tokens

    def seen(self, input_ids, *given):
        rows.append(len(input_ids))
        return embed(self, input_ids, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(quick.model), "_embed_tokens", seen)
        quick.generate(**prompts([6, 9]), num_beams=4, max_new_tokens=3, do_sample=False)
    assert rows[0] == 2
    assert set(rows[1:]) == {8}


def test_few_tokens_are_copied(searches, monkeypatch):
    copied, copy_rows = [], graphs.Steps.copy_rows

    def counted(self, rows, length):
        copied.append((len(rows), sum(length - first for _, _, first in rows), length))
        copy_rows(self, rows, length)

    monkeypatch.setattr(graphs.Steps, "copy_rows", counted)
    pair = make("qwen3")
    assert_as_library(pair, searches, **prompts([30]), max_new_tokens=30, eos_token_id=None)
    assert copied[0][:2] == (0, 0), "all beams come from one, and share the prompt"
    assert 0 < max(rows for rows, _, _ in copied) < 4, "the best of each beam stays where it is"
    assert all(tokens <= rows * (length - 30) for rows, tokens, length in copied)


def test_processors_see_the_beams_in_the_library_s_order(searches):
    class Own(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append((input_ids.clone(), scores.clone()))
            return scores

    plain, quick = make("t5")
    seen = []
    for model in (plain, quick):
        own = Own()
        model.generate(
            **prompts([5, 4]),
            logits_processor=LogitsProcessorList([own]),
            num_beams=3,
            max_new_tokens=12,
            do_sample=False,
        )
        seen.append(own.seen)
    assert len(seen[0]) == len(seen[1]) == 12
    for (text, scores), (own_text, own_scores) in zip(*seen, strict=True):
        assert torch.equal(own_text, text)
        torch.testing.assert_close(own_scores, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"do_sample": True}, "do_sample is given"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is given"),
        ({"use_cache": False}, "use_cache is given"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_does_not_know_goes_to_the_library(settings, reason, searches, untraced):
    plain, quick = make("marian")
    compiled = copy.deepcopy(plain).prepare_for_inference(compile=True)
    given = {**prompts([5, 4]), "num_beams": 3, "max_new_tokens": 6, "do_sample": False, **settings}
    texts = []
    for model in (plain, quick, compiled):
        torch.manual_seed(3)
        text = model.generate(**given)
        texts.append(getattr(text, "sequences", text))
    assert torch.equal(texts[1], texts[0])
    assert torch.equal(texts[2], texts[0])
    assert not searches
    for model in (quick, compiled):
        assert list(model.runtime.decoding.fallbacks.reasons) == [reason]
        assert f"writing: {reason}" in blockformer.explain(model).fallbacks


def test_beams_that_begin_with_different_texts_go_to_the_library(searches):
    plain, quick = make("qwen3")
    config = GenerationConfig(num_beams=2, max_new_tokens=4, do_sample=False)
    ids = prompts([6, 6])["input_ids"]
    ids[1] = ids[1].flip(0)
    texts = []
    for model in (plain, with_loop(quick)):
        settings, named = model._prepare_generation_config(config)
        settings.max_length = 10
        model._prepare_special_tokens(settings)
        criteria = StoppingCriteriaList(model._get_stopping_criteria(settings, StoppingCriteriaList()))
        given = {
            "logits_processor": LogitsProcessorList(),
            "stopping_criteria": criteria,
            "generation_config": settings,
        }
        with torch.no_grad():
            texts.append(model._beam_search(ids, **given, use_cache=True, **named))
    assert torch.equal(*texts)
    assert list(quick.runtime.decoding.fallbacks.reasons) == ["beams begin with different texts"]


@pytest.mark.parametrize("vocabulary", [97, 128 * 40, 128 * 40 + 1, 128 * 40 + 127])
def test_the_largest_are_found_by_blocks(vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, vocabulary, generator=generator)
    logits[0, -3:] += 9
    logits[1, 40:48] += 9  # of one block
    logits[2, 5:] = -torch.inf
    for count in (1, 8, 16):
        values, tokens = search._largest(logits, count)
        expected = logits.topk(count)
        assert torch.equal(values, expected.values)
        finite = expected.values.isfinite()
        assert torch.equal(tokens[finite], expected.indices[finite])
        assert torch.equal(logits.gather(1, tokens), values)
