"""The loop that writes text next to the library's: by the model's `forward`, and as on a GPU, on the CPU uncompiled."""

import copy
import functools
import pickle
import threading

import pytest
import torch
from pairs import assert_close
from peft import PrefixTuningConfig, get_peft_model
from sizes import STRONG
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)
from transformers.utils.deprecation import deprecate_kwarg

import blockformer
from blockformer import preset
from blockformer.engine import compiler, decoding, graphs, step
from blockformer.engine.decoding import Decoding
from blockformer.engine.graphs import room_for
from blockformer.engine.runtime import AcceleratorRuntime
from blockformer.engine.search import MOST_LATE
from blockformer.engine.step import CapturedSteps
from blockformer.engine.step_functions import StepFunctions
from blockformer.model.compat import CACHE
from blockformer.model.states import KNOWS_KEYS

DECODERS = {
    "qwen3": {"num_key_value_heads": 2},
    "gpt2": {},
    "gemma2": {"sliding_window": 6},
    "gpt_oss": {"sliding_window": 6, "num_experts": 4},
    "deepseek_v3": {},
    "qwen3, relative": {"position_type": "relative_bias"},
    "bloom": {},
    "opt": {},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8},
    "lara_mini": {"num_hidden_layers": 4, "sliding_window": 6, "num_experts": 4, "linear_key_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {
        "layer_types": ["state_space", "full_attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
}
SOURCED = {"t5": {}, "marian": {"decoder_start_token_id": 0}}


LOOP = {"kind": "graphs"}


@pytest.fixture(params=["graphs", "model"])
def loop(request, monkeypatch):
    """By which steps the models of `make` write."""
    monkeypatch.setitem(LOOP, "kind", request.param)
    return request.param


def make(name, **settings):
    """A model, and another one of the same weights with the loop."""
    torch.manual_seed(0)
    family, given = name.partition(",")[0], {**DECODERS, **SOURCED}[name]
    if family == "lara_mini" and not KNOWS_KEYS:
        pytest.skip("this transformers has no find_first_full_attention_index")
    config = preset(family, **{**STRONG, **given, **settings})
    kind = "EncoderDecoderForConditionalGeneration" if config.is_encoder_decoder else "DecoderForCausalLM"
    model = getattr(blockformer, f"Blockformer{kind}")(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)  # biases and norms, too
    return model, with_loop(copy.deepcopy(model))


def with_loop(model):
    """As `prepare_for_inference(compile=True)` leaves a model on a GPU; or prepared for a CPU."""
    if LOOP["kind"] == "model":
        return model.prepare_for_inference()
    for module in model.modules():
        if hasattr(module, "runtime"):
            module.runtime = AcceleratorRuntime()
    model.runtime.decoding = Decoding("cpu", CapturedSteps)
    return model


def prompts(lengths):
    """Prompts that are padded on the left."""
    rows = [
        torch.cat(
            [
                torch.zeros(max(lengths) - n, dtype=torch.long),
                torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)),
            ]
        )
        for n in lengths
    ]
    mask = [torch.arange(max(lengths)) >= max(lengths) - n for n in lengths]
    return {"input_ids": torch.stack(rows), "attention_mask": torch.stack(mask).long()}


def written(model, **settings):
    """A text, and the next random number."""
    torch.manual_seed(7)
    return model.generate(**settings), torch.rand(1)


def assert_as_library(pair, served=True, **settings):
    plain, quick = pair
    (expected, random), (found, own_random) = written(plain, **settings), written(quick, **settings)
    assert torch.equal(found, expected)
    assert torch.equal(own_random, random)
    assert bool(quick.runtime.decoding.fallbacks.reasons) != served, quick.runtime.decoding.fallbacks.reasons
    return found


@pytest.mark.versions
@pytest.mark.parametrize("name", [*DECODERS, *SOURCED])
def test_texts_are_the_library_s(name, loop):
    pair = make(name)
    for lengths in ([9, 4, 7], [5]):
        text = assert_as_library(pair, **prompts(lengths), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert name in SOURCED or text.unique().numel() > 4
        assert_as_library(pair, **prompts(lengths), max_new_tokens=40, do_sample=False, eos_token_id=[*range(2, 30)])
        assert_as_library(pair, **prompts(lengths), max_new_tokens=30, do_sample=True, eos_token_id=[*range(2, 9)])


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9},
        {"do_sample": True, "min_p": 0.1},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 9, "eos_token_id": [*range(2, 60), 50256]},
        {"eos_token_id": [*range(-60, 0)], "min_length": 12},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [8, 9]]},
        {"do_sample": True, "num_return_sequences": 3},
        {"forced_eos_token_id": 2},
        {"max_time": 1e6},
        {
            "logits_processor": LogitsProcessorList(
                [type("Own", (LogitsProcessor,), {"__call__": lambda s, i, x: -x})()]
            )
        },
    ],
    ids=lambda settings: next(iter(settings)) if len(settings) == 1 else " ".join(settings),
)
def test_processors_and_criteria_are_the_library_s(settings, loop):
    assert_as_library(make("qwen3"), **prompts([8, 5]), **{"max_new_tokens": 24, "do_sample": False, **settings})


@pytest.mark.parametrize("beams", [{}, {"num_beams": 3, "length_penalty": -5.0}])
def test_a_text_ends_with_a_string_of_the_caller_s(beams, tiny_tokenizer, loop):
    pair = make("qwen3", vocab_size=len(tiny_tokenizer))
    given = {**prompts([8, 5]), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    text = assert_as_library(pair, **given, stop_strings=[*"abcdefgh"], tokenizer=tiny_tokenizer, **beams)
    assert text.shape[1] < 32


class Slotted:
    """A processor, a criterion and a streamer without a `__dict__`, as an object of compiled code is."""

    __slots__ = ()

    def __call__(self, input_ids, scores):
        return torch.tensor([input_ids.shape[1] > 12]) if scores is None else -scores

    def put(self, value):
        print(value.tolist())

    def end(self):
        print("end")


@pytest.mark.parametrize(
    "settings", [{"logits_processor": [Slotted()]}, {"stopping_criteria": [Slotted()]}, {"streamer": Slotted()}]
)
def test_what_the_caller_brings_may_have_no_attributes(settings, loop, capsys):
    pair = make("qwen3")
    printed = []
    for model in pair:
        text = model.generate(**prompts([6]), **settings, max_new_tokens=20, do_sample=False, eos_token_id=None)
        printed.append((text.tolist(), capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert not pair[1].runtime.decoding.fallbacks.reasons


class Streamer:
    def __init__(self):
        self.seen, self.has_ended = [], False

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.has_ended = True


@pytest.mark.parametrize("ends", [None, [*range(2, 40)]], ids=["whole", "ends early"])
def test_a_streamer_gets_each_token_once(ends, loop):
    plain, quick = make("gpt2")
    seen = []
    for model in (plain, quick):
        streamer = Streamer()
        model.generate(**prompts([6]), streamer=streamer, max_new_tokens=20, do_sample=False, eos_token_id=ends)
        assert streamer.has_ended
        seen.append(streamer.seen)
    assert seen[0] == seen[1]
    assert not quick.runtime.decoding.fallbacks.reasons


def test_a_criterion_of_the_caller_s_is_asked_as_often_as_by_the_library(loop):
    class AfterFive(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.calls += 1
            return torch.full((len(input_ids),), self.calls >= 5)

    counts, texts = [], []
    for model in make("gpt2"):
        criterion = AfterFive()
        texts.append(
            model.generate(**prompts([6]), stopping_criteria=StoppingCriteriaList([criterion]), max_new_tokens=20)
        )
        counts.append(criterion.calls)
    assert counts == [5, 5]
    assert torch.equal(*texts)


class Keeps(LogitsProcessor, StoppingCriteria):
    """Keeps what it gets, and reads it as one row of numbers, which takes tokens that lie one behind the other."""

    def __init__(self):
        self.texts = []

    def __call__(self, input_ids, scores):
        self.texts.append(input_ids)
        ends = input_ids.view(-1)[-1] < 0
        return ends.expand(len(input_ids)) if scores is None else scores


@pytest.mark.parametrize("lengths", [[6, 4, 5], [6]])
def test_what_the_caller_s_code_gets_is_its_own(lengths, loop):
    """As in the library's loop it is contiguous, and no later text changes it."""
    kept = []
    for model in make("qwen3"):
        processor, criterion = Keeps(), Keeps()
        own = {"logits_processor": LogitsProcessorList([processor]), "max_new_tokens": 20, "eos_token_id": None}
        model.generate(**prompts(lengths), **own, stopping_criteria=StoppingCriteriaList([criterion]))
        model.generate(**prompts([length + 1 for length in lengths]), max_new_tokens=20, eos_token_id=None)
        kept.append([each.tolist() for each in processor.texts + criterion.texts])
    assert kept[0] == kept[1]
    assert not model.runtime.decoding.fallbacks.reasons


def test_a_criterion_of_the_caller_s_may_have_end_tokens_in_a_form_of_its_own(loop):
    """The library pads rows that have ended if a criterion has an attribute of that name."""

    class Below(StoppingCriteria):
        eos_token_id = 30

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] < self.eos_token_id

    given = {"stopping_criteria": StoppingCriteriaList([Below()]), "pad_token_id": 0, "max_new_tokens": 24}
    for ends in (None, [*range(40, 60)]):
        assert_as_library(make("qwen3"), **prompts([8, 5, 7]), **given, eos_token_id=ends)


class Plain:
    """A processor without attributes."""

    __slots__ = ()

    def __call__(self, input_ids, scores):
        return -scores


def test_a_processor_needs_no_dict_of_attributes(loop):
    assert_as_library(
        make("qwen3"), **prompts([8, 5]), logits_processor=LogitsProcessorList([Plain()]), max_new_tokens=9
    )


class Steers(LogitsProcessor):
    """Adds something to a layer's states between the third and the sixth new token."""

    def __init__(self, layer):
        self.layer, self.calls = layer, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            steered = torch.linspace(-40, 40, STRONG["hidden_size"])
            self.handle = self.layer.register_forward_hook(lambda layer, given, states: states + steered)
        if self.calls == 6:
            self.handle.remove()
        return scores


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3_5_text", "bamba", "marian", "t5"])
def test_a_processor_of_the_caller_s_may_hook_a_model_between_tokens(name, beams, loop, untraced):
    plain, on_gpu = make(name)
    on_cpu = copy.deepcopy(plain).prepare_for_inference(compile=True)
    texts = []
    for model in (plain, on_gpu, on_cpu):
        steers = LogitsProcessorList([Steers(model.get_decoder().layers[0])])
        given = {"logits_processor": steers, "num_beams": beams, "max_new_tokens": 12, "eos_token_id": None}
        texts.append(model.generate(**prompts([6, 4]), **given))
        assert steers[0].calls == 12
    assert torch.equal(texts[1], texts[0])
    assert torch.equal(texts[2], texts[0])
    unsteered = on_cpu.generate(**prompts([6, 4]), num_beams=beams, max_new_tokens=12, eos_token_id=None)
    assert not torch.equal(unsteered, texts[0])
    for model in (on_gpu, on_cpu):
        reasons = list(model.runtime.decoding.fallbacks.reasons)
        if model is on_cpu or loop == "graphs":
            assert len(reasons) == 1
            assert "changed the model in the middle" in reasons[0]
        else:  # the model itself sees the hook
            is_shared = name in SOURCED and beams > 1
            assert reasons == ["beams share a source, and code of the caller's might change the model"] * is_shared


class Turns(LogitsProcessor):
    """Gives a layer another matrix before the fourth new token."""

    def __init__(self, layer, replace):
        self.layer, self.replace, self.calls = layer, replace, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            self.replace(self.layer, -self.layer.weight)
        return scores


@pytest.mark.parametrize(
    "replace",
    [
        lambda layer, weight: setattr(layer.weight, "data", weight),
        lambda layer, weight: setattr(layer, "weight", torch.nn.Parameter(weight, requires_grad=False)),
        lambda layer, weight: layer.weight.copy_(weight),
    ],
    ids=["data", "parameter", "in place"],
)
def test_a_processor_of_the_caller_s_may_change_a_weight_between_tokens(replace, loop, untraced):
    plain, quick = make("qwen3")
    texts = []
    for model in (plain, quick, copy.deepcopy(plain).prepare_for_inference(compile=True)):
        given = {**prompts([6, 4]), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        whole = copy.deepcopy(model).generate(**given)
        turns = LogitsProcessorList([Turns(model.model.layers[0].self_attn.q_proj, replace)])
        texts.append(model.generate(**given, logits_processor=turns))
        assert not torch.equal(texts[-1], whole)
    assert torch.equal(texts[1], texts[0])
    assert torch.equal(texts[2], texts[0])


def test_a_streamer_of_the_caller_s_may_hook_a_model_between_tokens(loop, untraced):
    class Hooks(Streamer):
        def __init__(self, model):
            super().__init__()
            self.layer = model.model.layers[1]

        def put(self, value):
            super().put(value)
            if len(self.seen) == 4:
                self.layer.register_forward_hook(lambda layer, given, states: states * -1)

    plain, on_gpu = make("qwen3")
    texts, streamers = [], []
    for model in (plain, on_gpu, copy.deepcopy(plain).prepare_for_inference(compile=True)):
        streamers.append(Hooks(model))
        texts.append(model.generate(**prompts([6]), streamer=streamers[-1], max_new_tokens=12, eos_token_id=None))
    assert torch.equal(texts[1], texts[0])
    assert torch.equal(texts[2], texts[0])
    assert streamers[0].seen == streamers[1].seen == streamers[2].seen


def test_what_a_tokenizer_s_streamer_prints_changes_no_model(tiny_tokenizer):
    """So that compiled steps need not be looked after."""
    stop = StopStringCriteria(tiny_tokenizer, ["zz"])
    streamer = TextStreamer(tiny_tokenizer)
    assert not decoding._may_be_own(streamer)
    assert not decoding._may_be_own(stop)
    assert decoding._may_be_own(Streamer())
    assert decoding._may_be_own(PrefixConstrainedLogitsProcessor(lambda row, text: [3], 1))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3_5_text", "bamba"])
def test_a_cache_of_the_caller_s_is_gone_on_with_and_filled(name, loop, untraced):
    plain, on_gpu = make(name)
    on_cpu = copy.deepcopy(plain).prepare_for_inference(compile=True)
    ids = prompts([9])["input_ids"].repeat(2, 1)
    ids[1, :4] = 5
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    given = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    more = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(1))
    for model in (on_cpu, on_gpu):
        served = (
            model is on_cpu or loop == "model" or name in ("qwen3", "gemma2")
        )  # late tokens cannot be taken back from a state
        for first in ("empty", "made by generate", "filled"):
            outputs = []
            for each in (plain, model):
                cache = None if first == "made by generate" else DynamicCache(config=each.config)
                if "state" in str(each.config.layer_types) or "linear" in str(each.config.layer_types):
                    cache = None if cache is None else each.model.new_cache()
                if first == "filled":
                    with torch.no_grad():
                        each(ids[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
                one = each.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, **given)
                cache = one.past_key_values
                held = cache.get_seq_length()
                longer, seen = torch.cat([one.sequences, more], 1), torch.cat([mask, mask.new_ones(2, 14)], 1)
                two = each.generate(longer, attention_mask=seen, past_key_values=cache, max_new_tokens=9, **given)
                outputs.append((one.sequences, two.sequences, held, cache.get_seq_length()))
            (one, two, *lengths), (own_one, own_two, *own_lengths) = outputs
            assert torch.equal(own_one, one), first
            assert torch.equal(own_two, two), first
            assert own_lengths == lengths == [17, 31]
        assert (not model.runtime.decoding.fallbacks.reasons) == served


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "t5"])
def test_a_cache_that_a_call_returned_is_filled_by_the_next_one(name, beams, loop):
    """Also where the next call returns text only."""
    found = []
    for model in make(name):
        given = {**prompts([7]), "num_beams": beams, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        one = model.generate(**given, return_dict_in_generate=True)
        start = {"decoder_input_ids": one.sequences} if name in SOURCED else {"input_ids": one.sequences}
        mask = {} if name in SOURCED else {"attention_mask": torch.ones_like(one.sequences)}
        two = model.generate(**{**given, **mask, **start}, past_key_values=one.past_key_values)
        found.append((one.sequences, two, one.past_key_values.get_seq_length()))
    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
    assert found[1][2] == found[0][2] > 11


@pytest.mark.parametrize("name", ["qwen3", "t5"])
def test_a_cache_that_a_call_returned_is_filled_after_it_was_emptied(name, loop):
    found = []
    for model in make(name):
        given = {**prompts([7]), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        cache = model.generate(**given, return_dict_in_generate=True).past_key_values
        cache.reset()
        found.append((model.generate(**given, past_key_values=cache), cache.get_seq_length()))
    assert torch.equal(found[1][0], found[0][0])
    assert found[1][1] == found[0][1] > 5


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("longest", [5, 8, 10])
def test_a_criterion_of_the_caller_s_may_end_a_text_at_or_before_its_prompt(longest, settings, loop):
    criteria = StoppingCriteriaList([MaxLengthCriteria(longest)])
    settings = {**settings, "max_new_tokens": 6, "eos_token_id": None, "stopping_criteria": criteria}
    texts = assert_as_library(make("qwen3"), **prompts([8, 6]), **settings)
    assert texts.shape[1] == max(longest, 9)


class Louder(torch.nn.Module):
    """Stands in the place of embeddings, as trained prompts do, and has no weight."""

    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, input_ids):
        return self.embeddings(input_ids) * 1.5


def test_a_cache_is_gone_on_with_where_a_module_of_the_caller_s_embeds(loop):
    found = []
    for model in make("qwen3"):
        model.set_input_embeddings(Louder(model.get_input_embeddings()))
        given = {**prompts([7]), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        one = model.generate(**given, return_dict_in_generate=True)
        ids = torch.cat([one.sequences, prompts([4])["input_ids"]], 1)
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found.append(model.generate(**given, past_key_values=one.past_key_values))
    assert torch.equal(*found)


def test_code_that_fails_in_the_middle_leaves_a_cache_to_go_on_from(loop, untraced):
    class Fails(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 5:
                raise KeyboardInterrupt
            return scores

    plain, on_gpu = make("qwen3")
    found = []
    for model in (plain, on_gpu, copy.deepcopy(plain).prepare_for_inference(compile=True)):
        cache, given = DynamicCache(), {**prompts([8]), "do_sample": False, "eos_token_id": None}
        with pytest.raises(KeyboardInterrupt):
            model.generate(**given, past_key_values=cache, logits_processor=LogitsProcessorList([Fails()]))
        assert cache.get_seq_length() == 12
        found.append(cache.layers[1].keys)
    for keys in found[1:]:
        assert_close(keys, found[0])


def test_a_cache_that_holds_something_else_goes_to_the_library(loop):
    plain, quick = make("qwen3")
    ids = prompts([9])["input_ids"]
    with torch.no_grad():
        caches = [plain(ids[:, :4], use_cache=True).past_key_values for _ in range(2)]
    mask = torch.ones(1, 13, dtype=torch.long)  # the prompt is what comes after the cache's tokens
    texts = [
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
        for model, cache in zip((plain, quick), caches, strict=True)
    ]
    assert torch.equal(*texts)
    assert list(quick.runtime.decoding.fallbacks.reasons) == [
        "a cache is given that does not hold the beginning of the prompt"
    ]


def test_code_of_another_package_leaves_a_cache_to_the_library():
    """Before the prompt is read into it."""
    found = []
    pair = make("qwen3")
    for model in pair:
        model.model.layers[0].mlp.up_proj.__class__ = type("Linear", (torch.nn.Linear,), {"__module__": "another"})
        cache, given = DynamicCache(), {**prompts([6, 4]), "do_sample": False, "eos_token_id": None}
        text = model.generate(**given, past_key_values=cache, max_new_tokens=8)
        found.append((text.tolist(), cache.get_seq_length()))
    assert found[0] == found[1]
    reasons = pair[1].runtime.decoding.fallbacks.reasons
    assert list(reasons) == ["the model contains code of another package: another.Linear"]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["t5", "qwen3"])
def test_a_prefix_that_the_library_s_loop_brings_in_is_read(name, beams, loop):
    """PEFT gives it by a `prepare_inputs_for_generation` of its own, up to 0.21 by a name that 5.24 no longer uses."""
    plain, quick = make(name)
    texts, kind = [], "SEQ_2_SEQ_LM" if name in SOURCED else "CAUSAL_LM"
    for model in (plain, quick):
        torch.manual_seed(0)
        tuned = get_peft_model(model, PrefixTuningConfig(task_type=kind, num_virtual_tokens=4)).eval()
        for weight in tuned.prompt_encoder.parameters():
            weight.data *= 3
        if CACHE == "cache":  # transformers 5.24 passes its own, too, and its classes ignore PEFT's
            with pytest.raises(ValueError, match="cache and past_key_values are two names for one argument"):
                tuned.generate(**prompts([8, 5]), num_beams=beams, max_new_tokens=12)
            continue
        texts.append(tuned.generate(**prompts([8, 5]), num_beams=beams, max_new_tokens=12))
    if not texts:
        return
    assert torch.equal(*texts)
    assert "prepare_inputs_for_generation was replaced" in str(quick.runtime.decoding.fallbacks.reasons)
    unchanged = make(name)[0].generate(**prompts([8, 5]), num_beams=beams, max_new_tokens=12)
    assert unchanged.shape != texts[0].shape or not torch.equal(unchanged, texts[0])


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("method", ["", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"])
def test_what_the_caller_puts_into_the_library_s_loop_or_in_its_place_runs(method, beams, loop, monkeypatch):
    method = method or ("_sample" if beams == 1 else "_beam_search")
    usual, calls, counts, texts = getattr(GenerationMixin, method), [], [], []

    @functools.wraps(usual)
    def counted(*args, **named):
        calls.append(method)
        return usual(*args, **named)

    pair = make("qwen3")
    monkeypatch.setattr(GenerationMixin, method, counted)
    for model in pair:
        calls.clear()
        texts.append(model.generate(**prompts([8, 5]), num_beams=beams, max_new_tokens=6, eos_token_id=None))
        counts.append(len(calls))
    assert torch.equal(*texts)
    assert counts[0] == counts[1] > 0
    assert f"{method} was replaced" in pair[1].runtime.decoding.fallbacks.reasons


def test_a_method_that_the_library_itself_decorates_is_its_own(monkeypatch, loop):
    """As 5.24 does where an argument has a new name."""
    name = "prepare_inputs_for_generation"
    decorated = deprecate_kwarg("old", "9.0.0", new_name="new")(getattr(GenerationMixin, name))
    monkeypatch.setattr(GenerationMixin, name, decorated)
    assert_as_library(make("qwen3"), **prompts([6, 4]), max_new_tokens=8)


def test_the_host_looks_late_and_not_too_late(monkeypatch):
    _, model = make("qwen3")
    steps = []
    advance = graphs.Steps.advance
    monkeypatch.setattr(graphs.Steps, "advance", lambda self, *given: steps.append(1) or advance(self, *given))
    for most in (10, 20, 50):
        steps.clear()
        text = model.generate(**prompts([5]), max_new_tokens=most, do_sample=False, eos_token_id=[*range(2, 60)])
        assert len(steps) + 1 <= text.shape[1] - 5 + MOST_LATE
    assert len(steps) + 1 < 50


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "t5"])
def test_a_model_whose_config_asks_for_tuples_writes(name, beams, loop):
    pair = make(name)
    for model in pair:
        model.config.return_dict = False
    assert_as_library(pair, **prompts([6, 4]), max_new_tokens=8, do_sample=False, num_beams=beams)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores is given"),
        ({"return_dict_in_generate": True, "num_beams": 2}, "return_dict_in_generate is given"),
        ({"use_cache": False}, "use_cache is given"),
        ({"cache_implementation": "quantized"}, None),
        ({"token_type_ids": torch.zeros(1, 5, dtype=torch.long)}, "token_type_ids is given"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_does_not_know_goes_to_the_library(settings, reason, loop):
    plain, quick = make("qwen3", type_vocab_size=2 * ("token_type_ids" in settings))
    if reason is None:
        quick.generation_config.cache_implementation = settings["cache_implementation"]
        with pytest.raises((ImportError, ValueError)):  # the library's own
            quick.generate(**prompts([5]), max_new_tokens=4)
        return
    expected = plain.generate(**prompts([5]), max_new_tokens=4, do_sample=False, **settings)
    found = quick.generate(**prompts([5]), max_new_tokens=4, do_sample=False, **settings)
    assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))
    assert list(quick.runtime.decoding.fallbacks.reasons) == [reason]
    assert f"writing: {reason}" in blockformer.explain(quick).fallbacks


def test_a_hook_and_a_cache_of_the_caller_s_are_seen(loop):
    plain, quick = make("qwen3")
    calls = []
    hook = quick.model.layers[1].register_forward_hook(lambda *given: calls.append(1))
    served = loop == "model"  # it calls the model as the library does
    assert_as_library((plain, quick), served=served, **prompts([5]), max_new_tokens=4, do_sample=False)
    assert len(calls) == 4
    hook.remove()
    ids = prompts([9])["input_ids"]
    texts = []
    for model in (plain, quick):
        cache = model(ids[:, :4], use_cache=True).past_key_values
        texts.append(model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False))
        assert cache.get_seq_length() > 9
    assert torch.equal(*texts)


def _compress(part, given, named, output):
    """Keeps every second token of a prompt, as libraries that compress caches do by a hook."""
    layer = named["past_key_values"].layers[part.layer_idx]
    if named["hidden_states"].shape[1] > 1:
        layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_hook_may_compress_the_cache_of_a_prompt(name, is_given, loop):
    texts = []
    for model in make(name):
        whole = model.generate(**prompts([9]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(_compress, with_kwargs=True)
        cache = {"past_key_values": DynamicCache()} if is_given else {}
        text = model.generate(**prompts([9]), **cache, max_new_tokens=12, do_sample=False, eos_token_id=None)
        texts.append((text.tolist(), cache["past_key_values"].get_seq_length() if is_given else None))
        assert not torch.equal(text, whole)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["qwen3", "t5"])
def test_where_gradient_checkpointing_leaves_the_cache_empty_the_library_writes(name, loop):
    texts = []
    for model in make(name, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0):
        model.gradient_checkpointing_enable()
        texts.append(model.train().generate(**prompts([5]), max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)
    # Since 5.24 the library only empties it with gradients, which `generate` does without.
    assert len(model.runtime.decoding.fallbacks.reasons) == (CACHE == "past_key_values" or loop == "graphs")


def _forget(cache):
    """Keeps the last five tokens, as windows do that somebody adds to a model."""
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        layer.keys, layer.values = layer.keys[:, :, -5:], layer.values[:, :, -5:]


def _hook(part):
    part.register_forward_hook(lambda part, given, output: _forget(output.past_key_values))


def _replace_forward(part):
    forward = part.forward

    @functools.wraps(forward)
    def forgetful(*args, **kwargs):
        output = forward(*args, **kwargs)
        _forget(output.past_key_values)
        return output

    part.forward = forgetful


@pytest.mark.parametrize("watch", [_hook, _replace_forward])
@pytest.mark.parametrize("place", ["", "model", "model.decoder"])
def test_what_a_model_returns_may_be_changed(place, watch, loop):
    """A hook may take tokens out of the cache that is returned, after each of them."""
    name = "t5" if place == "model.decoder" else "qwen3"
    texts = []
    for model in make(name):
        whole = model.generate(**prompts([9]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        watch(model.get_submodule(place))
        texts.append(model.generate(**prompts([9]), max_new_tokens=12, do_sample=False, eos_token_id=None))
        assert not torch.equal(texts[-1], whole)
    assert torch.equal(*texts)


def _note(outputs, name, part, given, output):
    first = output[0] if isinstance(output, tuple) else output
    outputs.append((name, [*first.shape] if isinstance(first, torch.Tensor) else None))


@pytest.mark.parametrize("name", ["gemma2", "bamba", "t5"])
def test_hooks_of_a_prepared_model_see_what_they_see_in_the_library_s_loop(name):
    """Also in a mode that draws numbers, and with attention that is not PyTorch's."""
    seen: list = []
    for model in (make(name)[0], make(name)[0].prepare_for_inference()):
        model.set_attn_implementation("eager")
        model.get_decoder().layers[1].train()
        outputs: list = []
        for place, part in model.get_decoder().named_modules():
            if place:  # the decoder itself returns the cache
                part.register_forward_hook(functools.partial(_note, outputs, place))
        torch.manual_seed(0)
        text = model.generate(**prompts([6, 4]), max_new_tokens=8, do_sample=True, eos_token_id=None)
        seen.append((text.tolist(), outputs, torch.rand(1)))
    assert seen[0] == seen[1]
    assert not model.runtime.decoding.fallbacks.reasons


def test_logits_that_a_hook_keeps_stay_as_they_are():
    """A processor forbids tokens in a copy of them."""
    found = []
    for model in (make("qwen3")[0], make("qwen3")[0].prepare_for_inference()):
        kept: list = []
        model.lm_head.register_forward_hook(lambda head, given, logits, kept=kept: kept.append(logits[:, -1]))
        given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "eos_token_id": [*range(2, 60)]}
        model.generate(**prompts([6, 4]), **given)
        found.append(torch.stack(kept))
    assert_close(found[1], found[0])


def test_a_changed_weight_is_seen(loop):
    plain, quick = make("qwen3", num_hidden_layers=3)
    settings = {**prompts([7, 3]), "max_new_tokens": 16, "do_sample": False}
    before = assert_as_library((plain, quick), **settings)
    for model in (plain, quick):
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)  # a part of a joined product, in place
    assert not torch.equal(assert_as_library((plain, quick), **settings), before)
    for model in (plain, quick):
        model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data * -2
        model.model.layers[2].mlp.down_proj.weight = torch.nn.Parameter(torch.ones(32, 48), requires_grad=False)
    assert_as_library((plain, quick), **settings)


def test_a_weight_of_two_layers_is_followed(loop):
    """It can be a part of one joined product only."""
    pair = make("qwen3")
    settings = {**prompts([7, 3]), "max_new_tokens": 16, "do_sample": False}
    for model in pair:
        first, second = model.model.layers
        second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    before = assert_as_library(pair, **settings)
    for model in pair:
        model.model.layers[0].self_attn.q_proj.weight.mul_(-1)
    assert not torch.equal(assert_as_library(pair, **settings), before)


def test_joined_weights_are_saved_copied_and_given_back(tmp_path):
    plain, quick = make("qwen3", attention_bias=True)
    settings = {**prompts([7]), "max_new_tokens": 12, "do_sample": False}
    parameters = {id(parameter) for parameter in quick.parameters()}
    expected = assert_as_library((plain, quick), **settings)
    attention = quick.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert {id(parameter) for parameter in quick.parameters()} == parameters
    quick.save_pretrained(tmp_path)
    again = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for other in (copy.deepcopy(quick), pickle.loads(pickle.dumps(quick))):
        assert_as_library((plain, other), **settings)
    assert torch.equal(quick.generate(**settings), expected)
    quick.runtime.decoding.undo()
    assert attention.q_proj.weight.untyped_storage().nbytes() == attention.q_proj.weight.nbytes


def test_a_product_with_an_adapter_is_left_to_itself():
    peft = pytest.importorskip("peft")
    plain, quick = make("qwen3")
    for model in (plain, quick):
        torch.manual_seed(1)
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False), model)
    assert_as_library((plain, quick), served=False, **prompts([6]), max_new_tokens=8, do_sample=False)


def test_inference_mode_threads_and_batches_of_all_sizes(loop):
    plain, quick = make("qwen3")
    batches = [prompts([6]), prompts([3, 8]), prompts([5, 2, 4]), prompts([9])]
    expected = [plain.generate(**batch, max_new_tokens=14, do_sample=False) for batch in batches]
    with torch.inference_mode():
        assert torch.equal(quick.generate(**batches[1], max_new_tokens=14, do_sample=False), expected[1])
    found: list = [None] * 12

    def work(index):
        with torch.no_grad():
            found[index] = quick.generate(**batches[index % 4], max_new_tokens=14, do_sample=False)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(12)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(text, expected[index % 4]) for index, text in enumerate(found))
    assert len(quick.runtime.decoding._free) <= decoding._MOST_FREE
    assert not quick.runtime.decoding.fallbacks.reasons


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3", [[7, 4]]),
        ("qwen3_5_text", [[8, 5], [10, 4]]),  # attention with a gate, and layers with a state
        ("bamba", [[7, 4], [9, 4]]),
        ("lfm2", [[5, 4], [7, 4]]),
    ],
)
def test_alike_layers_are_compiled_once_with_joined_products(name, layers, monkeypatch):
    counts = []

    def matmuls(graph_module):
        return sum(str(node.target) in ("aten.mm.default", "aten.addmm.default") for node in graph_module.graph.nodes)

    def forward_of(graph_module, example_inputs):
        before = matmuls(graph_module)
        graph_module = compiler.without_repeats(graph_module)
        counts.append([before, matmuls(graph_module)])
        return make_boxed_func(graph_module.forward)

    in_aten = aot_autograd(fw_compiler=forward_of)
    monkeypatch.setattr(compiler, "_backend", lambda options, *given: in_aten(*given))
    monkeypatch.setattr(
        step, "StepFunctions", lambda *given, device, **named: StepFunctions(*given, device="cuda", **named)
    )
    types = DECODERS[name].get("layer_types", ["full_attention"])
    pair = make(name, num_hidden_layers=6, layer_types=6 // len(types) * types)
    assert_as_library(pair, **prompts([5]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert sorted(counts) == [[0, 0], [0, 0], [1, 1], *layers], "what has no products, the head, layers of each kind"


@pytest.mark.parametrize(
    "name", ["qwen3", "gpt2", "gemma2", "t5", "marian", "bloom", "qwen3_5_text", "olmo_hybrid", "lfm2", "bamba"]
)
def test_a_cpu_writes_by_its_compiled_steps(name, untraced):
    plain, quick = make(name)[0], make(name)[0].prepare_for_inference(compile=True)
    ways = [
        {"do_sample": False, "eos_token_id": None},
        {"do_sample": False, "eos_token_id": [*range(2, 40)]},
        {"do_sample": True, "top_k": 20, "temperature": 0.8},
        {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 4},
    ]
    for lengths in ([7], [5, 3], [4, 6, 2, 5, 3]):
        for way in ways:
            given = {**prompts(lengths), "max_new_tokens": 11, **way}
            (expected, random), (found, own_random) = written(plain, **given), written(quick, **given)
            assert torch.equal(found, expected), (lengths, way)
            assert torch.equal(own_random, random)
            with torch.inference_mode():
                assert torch.equal(written(quick, **given)[0], found)
    assert not quick.runtime.decoding.fallbacks.reasons


def test_a_cpu_takes_memory_as_the_text_grows(untraced, monkeypatch):
    rooms, advance = [], graphs.Steps.advance
    monkeypatch.setattr(
        graphs.Steps, "advance", lambda self, *given: (advance(self, *given), rooms.append(self.room))[0]
    )
    monkeypatch.setattr(graphs, "_LEAST_ROOM", 16)
    sizes = {"max_position_embeddings": 1 << 20}
    plain, quick = (make("qwen3", **sizes)[0] for _ in range(2))
    quick.prepare_for_inference(compile=True)
    given = {**prompts([5, 3]), "do_sample": False, "eos_token_id": None}
    assert torch.equal(quick.generate(**given, max_new_tokens=90), plain.generate(**given, max_new_tokens=90))
    assert len(set(rooms)) > 2
    assert rooms == sorted(rooms)
    assert (rooms[0] < 40, rooms[-1] < 200) == (True, True)
    rooms.clear()
    ends = {**given, "eos_token_id": [*range(2, 60)], "max_new_tokens": 500_000}
    assert torch.equal(quick.generate(**ends), plain.generate(**ends))
    assert max(rooms) < 200


def test_a_cpu_looks_at_each_token(untraced, monkeypatch):
    steps, advance = [], graphs.Steps.advance
    monkeypatch.setattr(graphs.Steps, "advance", lambda self, *given: steps.append(1) or advance(self, *given))
    model = make("qwen3")[0].prepare_for_inference(compile=True)
    text = model.generate(**prompts([5]), max_new_tokens=50, do_sample=False, eos_token_id=[*range(2, 60)])
    assert len(steps) == text.shape[1] - 5 - 1 < 40


def test_a_text_that_the_compiler_fails_at_is_the_library_s(monkeypatch):
    def fail(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    plain, quick = make("qwen3")[0], make("qwen3")[0].prepare_for_inference(compile=True)
    given = {**prompts([5]), "max_new_tokens": 6, "do_sample": True}
    (expected, random), (found, own_random) = written(plain, **given), written(quick, **given)
    assert torch.equal(found, expected)
    assert torch.equal(own_random, random)
    assert quick.runtime.decoding.fallbacks.reasons
    plain, quick = make("qwen3_5_text")[0], make("qwen3_5_text")[0].prepare_for_inference(compile=True)
    streamers = [Streamer(), Streamer()]
    texts = [written(model, **given, streamer=each)[0] for model, each in zip((plain, quick), streamers, strict=True)]
    assert torch.equal(*texts)
    assert streamers[0].seen == streamers[1].seen


def test_rooms_are_few_and_not_much_too_large():
    assert [room_for(length) for length in (1, 128, 129, 2048, 2049, 5000)] == [128, 128, 256, 2048, 2304, 5120]
    assert len({room_for(length) for length in range(1, 32768)}) < 60
    assert all(length <= room_for(length) <= max(1.125 * length, length + 128) for length in range(1, 32768, 7))
