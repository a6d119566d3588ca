"""Compiled steps write the text of the uncompiled model, follow what changes, and step aside where they do not fit."""

import copy
import io
import os
import subprocess
import sys

import accelerate
import pytest
import torch
from pairs import assert_as_exact, assert_close, in_float64, token_ids
from quantized_layers import low_of
from sizes import STRONG
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer
from written_scores import scores_of_two

import blockformer
from blockformer import preset
from blockformer.engine import choices, compiler, graphs, step, step_functions
from blockformer.engine.attention import PreparedAttention
from blockformer.engine.few_rows import BLOCK
from blockformer.engine.runtime import TrainingRuntime
from blockformer.engine.step import CompiledSteps, StepExperts, StepLayers
from blockformer.engine.step_functions import StepFunctions, twin
from blockformer.watched import Modules

# On a busy machine the compiler may take minutes for one step, and some tests compile four.
pytestmark = pytest.mark.timeout(1200)


def pair(family="qwen3", dtype=torch.float32, **settings):
    """A model, and a compiled copy of it."""
    torch.manual_seed(0)
    config = preset(family, **STRONG, **settings)
    cls = (
        blockformer.BlockformerEncoderDecoderForConditionalGeneration
        if config.is_encoder_decoder
        else blockformer.BlockformerDecoderForCausalLM
    )
    plain = cls(config).to(dtype).eval()
    return plain, copy.deepcopy(plain).prepare_for_inference(compile=True)


def prompts(model, rows=3):
    """Padded prompts, of a decoder on the left."""
    ids = token_ids(rows, 9, vocab=STRONG["vocab_size"])
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, (slice(-2 * row, None) if model.config.is_encoder_decoder else slice(2 * row))] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def text(model, rows=3, **settings):
    torch.manual_seed(1)
    return model.generate(**prompts(model, rows), **{"max_new_tokens": 12, "do_sample": False, **settings})


def kinds(model):
    """What was compiled: for how many sources, None for any number, and the beams of each."""
    return set(model.runtime.decoding.steps.kinds() or ())


WAYS = [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"repetition_penalty": 1.3}]


def test_the_text_is_the_same_in_every_way_of_generating():
    plain, quick = pair()
    for settings in WAYS:
        assert torch.equal(text(quick, **settings), text(plain, **settings)), settings
    assert kinds(quick) == {(3, 1), (None, 1)}
    draft = copy.deepcopy(plain)
    assert torch.equal(text(quick, 1, assistant_model=draft), text(plain, 1, assistant_model=draft))

    streams = [Stream(), Stream()]
    ways = {"stopping_criteria": StoppingCriteriaList([StopAt(17)]), "max_new_tokens": 20}
    for model, stream in zip((quick, plain), streams, strict=True):
        assert text(model, streamer=stream, **ways).shape == (3, 17)
    assert len(streams[0].tokens) == 9  # the prompts, and eight tokens of each row
    assert streams[0].tokens == streams[1].tokens
    assert kinds(quick) <= {(1, 1), (3, 1), (None, 1)}


def test_drafts_of_the_first_layers_run_without_compiled_parts(untraced):
    plain, quick = pair()
    whole = text(plain, 1)
    assert torch.equal(text(quick, 1), whole)
    assert kinds(quick) == {(1, 1)}
    assert torch.equal(text(quick, 1, assistant_early_exit=1), whole)
    assert (quick.config.num_hidden_layers, text(quick, 1).tolist()) == (2, whole.tolist())


@pytest.mark.parametrize("way", [{"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3}, "assistant"])
def test_drafts_behind_a_window_are_taken_back(way, untraced):
    plain, quick = family_pair("mistral")
    if way == "assistant":
        torch.manual_seed(5)
        draft = blockformer.BlockformerDecoderForCausalLM(plain.config).eval()
        ways = [
            {"assistant_model": copy.deepcopy(draft)},
            {"assistant_model": draft.prepare_for_inference(compile=True)},
        ]
    else:
        ways = [way, way]
    texts = [text(model, 1, **each) for model, each in zip((plain, quick), ways, strict=True)]
    assert torch.equal(*texts)


FAMILIES = "gpt2 llama mistral opt bert-decoder t5-v1.1 umt5 marian bart qwen3_moe gpt_oss qwen3_5_text lfm2".split()


STATES = {"qwen3_5_text": "linear_attention", "lfm2": "conv"}


def family_pair(family):
    """A pair of a family; windows are shorter than a prompt, token vectors narrower than states."""
    settings = {"decoder_start_token_id": 0} if preset(family).is_encoder_decoder else {}
    if getattr(preset(family), "num_experts", 0):
        settings |= {"num_experts": 6, "moe_intermediate_size": 24}
    if family == "opt":
        settings |= {"token_embedding_size": 20, "norm_placement": "post", "final_norm": False}
    if family == "nemotron_h":
        settings |= {"num_experts": 6, "moe_intermediate_size": 24, "moe_latent_size": 20, "mlp_layers": None}
        settings |= {"layer_types": ["state_space", "full_attention"]}
    if family in STATES:
        settings |= {"layer_types": [STATES[family], "full_attention"]}
    if family == "mistral":
        settings |= {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
        settings |= {"attention_gate": True}
    return pair(family, **settings)


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "opt", "umt5", "nemotron_h"])
def test_the_step_is_right_before_it_is_compiled(family, together, untraced, monkeypatch):
    monkeypatch.setattr(step_functions, "_SMALL_LAYERS", together)
    plain, quick = family_pair(family)
    for rows in (1, 3):
        for settings in WAYS[:2]:
            assert torch.equal(text(quick, rows, **settings), text(plain, rows, **settings)), (rows, settings)
    assert len(kinds(quick)) >= (1 if family == "nemotron_h" else 2)  # with experts, steps are for one row


@pytest.mark.parametrize(
    ("layers", "sizes"), [(1, [1]), (6, [6]), (9, [8, 1]), (10, [5, 5]), (22, [8, 8, 6]), (28, [7] * 4), (30, [6] * 5)]
)
def test_few_layers_are_compiled_and_few_functions_called(layers, sizes, monkeypatch):
    model = blockformer.BlockformerDecoderModel(preset("qwen3", **{**STRONG, "num_hidden_layers": layers}))
    assert [len(group) for group in step_functions._groups_of(model.layers, 8)] == sizes
    monkeypatch.setattr(step_functions, "_SMALL_LAYER", 0)
    assert [len(group) for group in step_functions._groups_of(model.layers, 8)] == [1] * layers


def test_steps_read_no_more_than_a_window(untraced):
    plain, quick = family_pair("mistral")
    long = {"max_new_tokens": 90, "min_new_tokens": 90, "return_dict_in_generate": True}
    places, run = [], StepFunctions.computed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepFunctions, "computed", lambda *given: places.append(given[3:5]) or run(*given))
        written = text(quick, **long)
    assert torch.equal(written.sequences, text(plain, **long).sequences)
    seen = [{kind: blocks.shape[1] * BLOCK for kind, (blocks, _) in each.items()} for each, _ in places]
    assert len(seen) == 90
    assert max(each["full_attention"] for each in seen) >= 9 + 90
    assert max(each["sliding_attention"] for each in seen) <= 6 + 2 * BLOCK
    # The compiler makes other code for what begins where its memory does.
    assert all(buffer.storage_offset() for _, buffers in places for buffer in buffers[0])
    windows, whole = (layer.keys for layer in written.past_key_values.layers)
    assert (windows.shape[2], whole.shape[2]) == (5, 9 + 89)
    draft = {"assistant_model": copy.deepcopy(plain), "max_new_tokens": 30}
    assert torch.equal(text(quick, 1, **draft), text(plain, 1, **draft))
    assert torch.equal(text(quick, 1, prompt_lookup_num_tokens=3, max_new_tokens=30), text(plain, 1, max_new_tokens=30))


def test_a_text_of_layers_that_keep_a_state():
    plain, quick = family_pair("qwen3_5_text")
    assert torch.equal(text(quick, 1), text(plain, 1))
    assert kinds(quick) == {(1, 1)}
    assert not quick.runtime.decoding.fallbacks.reasons


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_experts_in_a_step_give_the_same(family):
    plain, quick = family_pair(family)
    states = torch.randn(1, 1, STRONG["hidden_size"])
    sparse = plain.model.layers[1].mlp
    in_step = twin(sparse, StepLayers(1, torch.float32, {}))
    assert type(in_step.experts) is StepExperts
    assert_close(in_step(states), sparse(states))
    quick.config.output_router_logits = True
    ids = token_ids(1, 9, vocab=97)
    cache = quick(ids, use_cache=True).past_key_values
    assert quick(ids[:, :1], past_key_values=cache).router_logits is not None


class Stream(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        """Nothing to do."""


class StopAt(StoppingCriteria):
    """Every row ends at a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_assisted_decoding_with_compiled_models_on_both_sides(family):
    settings = {"decoder_start_token_id": 0} if preset(family).is_encoder_decoder else {}
    plain, quick = pair(family, **settings)
    torch.manual_seed(5)
    draft = copy.deepcopy(plain)
    for weight in draft.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    quick_draft = copy.deepcopy(draft).prepare_for_inference(compile=True)
    for assistant, other in ((draft, draft), (quick_draft, draft), (quick, plain)):
        assert torch.equal(text(quick, 1, assistant_model=assistant), text(plain, 1, assistant_model=other))
    assert not kinds(quick_draft)  # the library's loop asks a draft for its scores, and calls the model itself
    if family == "qwen3":
        lookup = {"prompt_lookup_num_tokens": 2}
        assert torch.equal(text(quick, 1, **lookup), text(plain, 1, **lookup))


@pytest.mark.exhaustive
def test_beams_of_an_encoder_decoder():
    plain, quick = pair("t5", decoder_start_token_id=0)
    assert torch.equal(text(quick, num_beams=3), text(plain, num_beams=3))
    assert kinds(quick) == {(None, 3)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_kind_of_batch(family):
    plain, quick = family_pair(family)
    for rows in (1, 3):
        for settings in WAYS:
            assert torch.equal(text(quick, rows, **settings), text(plain, rows, **settings)), (rows, settings)
    has_experts = bool(quick.config.num_experts)  # whose several rows run uncompiled
    assert len(kinds(quick)) >= (1 if has_experts else 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_other_dtypes(dtype):
    plain, quick = pair(dtype=dtype)
    ids = token_ids(3, 9, vocab=97)
    with in_float64(plain) as wide:
        exact = one_more_token(wide, ids)
    assert_as_exact(one_more_token(quick, ids), one_more_token(plain, ids), exact, times=2)
    assert kinds(quick) == {(3, 1)}


def one_more_token(model, ids):
    """The logits after a token that is written after a prompt."""
    return scores_of_two(model, ids)[1][:, None]


def test_whether_modules_are_untouched_is_asked_each_time():
    model = pair()[0]
    parts, mlp = Modules(model), model.model.layers[0].mlp
    assert parts.are_untouched()
    for module in (model, mlp):
        handle = module.register_forward_hook(lambda *_: None)
        assert not parts.are_untouched()
        handle.remove()
        assert parts.are_untouched()
        module.forward = module.forward
        assert not parts.are_untouched()
        del module.forward
        assert parts.are_untouched()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not parts.are_untouched()
    handle.remove()
    model.model.layers[0].mlp = copy.copy(mlp)
    assert not parts.are_untouched()
    model.model.layers[0].mlp = mlp
    assert parts.are_untouched()
    assert model.model.embedding_norm is None
    model.model.embedding_norm = torch.nn.LayerNorm(32)
    assert not parts.are_untouched()
    del model.model.embedding_norm
    model.model.embedding_norm = None
    assert parts.are_untouched()
    for holder, name in ((model.config, "logit_scale"), (model.model.norm, "eps"), (mlp.up_proj, "factor")):
        before = getattr(holder, name, None)
        setattr(holder, name, 0.5)
        assert parts.are_untouched() == (name == "factor")  # which nothing reads
        setattr(holder, name, before)
        assert parts.are_untouched()
    config, model.config = model.config, copy.deepcopy(model.config)
    assert parts.are_untouched()
    model.config.logit_scale = 0.5
    assert not parts.are_untouched()
    model.config = config
    layer = model.model.layers[0]
    changes = [(layer, "rotates", False), (layer, "residual", "parallel"), (layer.self_attn, "is_causal", False)]
    changes += [(layer.self_attn, "heads", [1, 0]), (layer, "residual_step", lambda *given: given[-1])]
    for holder, name, value in changes:  # a method, too, may stand in a module's own attributes
        is_own, before = name in vars(holder), getattr(holder, name)
        setattr(holder, name, value)
        assert not parts.are_untouched(), name
        setattr(holder, name, before) if is_own else delattr(holder, name)
        assert parts.are_untouched()
    mlp.train()  # which drops, as a whole model in training mode does
    assert not parts.are_untouched()
    mlp.eval()
    assert parts.are_untouched()
    model(torch.ones(1, 2, dtype=torch.long), output_hidden_states=True)  # leaves hooks behind, which are idle
    assert parts.are_untouched()
    with_hooks = [module for module in model.modules() if module._forward_hooks]
    assert with_hooks
    collector = sys.modules["transformers.utils.output_capturing"]._active_collector
    token = collector.set({})
    collector.set({"hidden_states": []})
    assert not parts.are_untouched()
    collector.reset(token)
    assert parts.are_untouched()


class Doubling(torch.Tensor):
    """A weight as libraries that quantize have it: another kind of tensor, which the compiler cannot read."""

    @staticmethod
    def __new__(cls, numbers):
        kind = {"strides": numbers.stride(), "dtype": numbers.dtype, "requires_grad": False}
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, **kind)

    def __init__(self, numbers):
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function not in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.mm.default):
            raise NotImplementedError(f"{function} of a quantized weight")
        plain = torch.utils._pytree.tree_map_only(cls, lambda each: each.numbers, args)
        result = function(*plain, **(kwargs or {}))
        return 2 * result if function is torch.ops.aten.mm.default else cls(result)


def test_weights_that_are_quantized_after_the_first_text_run_uncompiled(untraced):
    plain, quick = pair()
    assert torch.equal(text(quick), text(plain))
    for model in (plain, quick):
        layer = model.model.layers[1].mlp.up_proj
        layer.weight = torch.nn.Parameter(Doubling(layer.weight.detach()), requires_grad=False)
    written = text(quick)
    assert torch.equal(written, text(plain))
    (reason,) = quick.runtime.decoding.fallbacks.reasons
    assert "kind of weight" in reason


class Doubled(TorchFunctionMode):
    """Replaces the matmul of linear layers."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.nn.functional.linear else result


def test_under_a_function_mode_it_runs_uncompiled(untraced):
    plain, quick = pair()
    with Doubled():
        assert torch.equal(text(quick), text(plain))
    assert not kinds(quick)


def _pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _write(model):
    model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    model.model.layers[1].self_attn.q_proj.weight.mul_(1.5)


def _replace(model):
    model.model.norm.weight.data = model.model.norm.weight.data * 2
    model.model.layers[1].mlp.gate_proj.weight = torch.nn.Parameter(model.model.layers[1].mlp.gate_proj.weight * 2)
    model.model.layers[1].mlp.down_proj.weight.data = model.model.layers[1].mlp.down_proj.weight.data * 2


def _other_weights():
    torch.manual_seed(5)
    config = preset("qwen3", **STRONG)
    return blockformer.BlockformerDecoderForCausalLM(config).state_dict()


@torch.no_grad()
def test_weights_that_change_or_move_are_seen():
    plain, quick = pair()
    ids = token_ids(9, 9, vocab=97)
    assert_close(one_more_token(quick, ids), one_more_token(plain, ids))
    for change in (_write, _replace, lambda model: model.load_state_dict(_other_weights())):
        change(plain), change(quick)
        assert_close(one_more_token(quick, ids), one_more_token(plain, ids))
    for each in (plain, quick):
        each.to(torch.bfloat16).to(torch.float32)  # the old memory may be another tensor's afterwards
    assert_close(one_more_token(quick, ids), one_more_token(plain, ids))
    for each in (plain, quick):
        torch.manual_seed(3)
        each.lm_head = torch.nn.Linear(32, 97, bias=False)
    assert_close(one_more_token(quick, ids), one_more_token(plain, ids))
    assert kinds(quick) == {(None, 1)}
    assert quick.runtime.decoding.steps.bytes_of_copies() == 0
    quick.prepare_for_training()
    assert type(quick.runtime) is TrainingRuntime
    assert_close(one_more_token(quick, ids), one_more_token(plain, ids))


@pytest.mark.parametrize("is_faster", [True, False])
@torch.no_grad()
def test_many_rows_are_multiplied_right_whatever_is_faster(is_faster, monkeypatch):
    monkeypatch.setitem(choices.FASTER_HERE, (choices.ONEDNN, torch.float32), is_faster)
    plain, quick = pair()
    for rows in (6, 9, 40):
        ids = token_ids(rows, 9, vocab=97)
        assert_close(one_more_token(quick, ids), one_more_token(plain, ids))
    assert kinds(quick) == {(None, 1)}


@torch.no_grad()
def test_a_copy_has_steps_of_its_own(untraced):
    plain, quick = pair()
    ids = token_ids(3, 9, vocab=97)
    models = (quick, copy.deepcopy(quick), _pickled(quick))
    assert len({id(each.runtime.decoding.steps) for each in models}) == 3
    for again in models:
        assert isinstance(again.runtime.decoding.steps, CompiledSteps)
        assert_close(one_more_token(again, ids), one_more_token(plain, ids))
        assert kinds(again) == {(3, 1)}
    _write(quick)
    assert not torch.equal(one_more_token(quick, ids), one_more_token(again, ids))


@torch.no_grad()
def test_it_steps_aside_where_more_is_asked_for():
    plain, quick = pair()
    ids, calls = token_ids(3, 9, vocab=97), []
    cache = quick(ids[:, :-1], use_cache=True).past_key_values
    output = quick(ids[:, -1:], past_key_values=cache, use_cache=True, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    library = DynamicCache(config=quick.config)
    quick(ids[:, :-1], past_key_values=library)
    assert_close(quick(ids[:, -1:], past_key_values=library).logits, plain(ids).logits[:, -1:])
    hook = quick.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    one_more_token(quick, ids)
    assert len(calls) == 2
    hook.remove()
    with pytest.raises(ValueError, match="the vocabulary has 0 to 96"):
        quick(torch.full((3, 1), 97), past_key_values=quick(ids, use_cache=True).past_key_values)
    assert not kinds(quick)


def test_compiled_parts_have_no_hooks_of_a_call_for_hidden_states():
    """The compiler cannot trace transformers' hooks, which stay when that call is over."""
    plain, _ = pair()
    plain(**prompts(plain), output_hidden_states=True)
    layer = plain.model.layers[0]
    assert layer._forward_hooks
    assert not any(each._forward_hooks for each in twin(layer).modules())
    assert layer._forward_hooks


@pytest.mark.parametrize("family", ["qwen3", "marian"])
@torch.no_grad()
def test_a_call_that_asks_for_more_does_not_end_the_steps(family, untraced):
    plain, quick = family_pair(family)
    steps = []
    run = StepFunctions.computed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepFunctions, "computed", lambda *given: steps.append(1) or run(*given))
        everything = {"output_hidden_states": True, "return_dict_in_generate": True}
        asked = [text(model, **everything) for model in (plain, quick)]
        assert not steps
        assert torch.equal(asked[0].sequences, asked[1].sequences)
        name = "decoder_hidden_states" if quick.config.is_encoder_decoder else "hidden_states"
        for theirs, ours in zip(asked[0][name], asked[1][name], strict=True):
            assert len(ours) == 3
            for expected, found in zip(theirs, ours, strict=True):
                assert_close(found, expected)
        assert torch.equal(text(quick), text(plain))
        count = len(steps)
        assert count > 5
        quick.get_decoder().config.output_hidden_states = True  # as a config may have it
        assert torch.equal(text(quick), text(plain))
        assert len(steps) == count
    later = copy.deepcopy(plain).prepare_for_inference(compile=True)  # prepared after it was asked
    assert Modules(later, without=later.get_encoder() if later.config.is_encoder_decoder else None).are_untouched()
    assert type(later.get_decoder().layers[0].self_attn) is PreparedAttention


@pytest.mark.parametrize("family", ["qwen3", "mistral", "marian"])
def test_a_learned_prefix_gets_its_gradients(family, untraced):
    """Keys and values of a prefix, or a source, that are trained before a frozen model."""
    gradients: list = []
    for model in family_pair(family):
        model.requires_grad_(False)
        config, stack = model.config, model.get_decoder()
        torch.manual_seed(1)
        if config.is_encoder_decoder:
            learned = [torch.randn(1, 6, config.hidden_size, requires_grad=True)]
            given = {"encoder_outputs": (learned[0],), "decoder_input_ids": torch.ones(1, 2, dtype=torch.long)}
            cache = model(**given, use_cache=True).past_key_values
            token = {**given, "decoder_input_ids": torch.tensor([[5]])}
        else:
            shape = (1, config.num_key_value_heads, 5, config.head_dim)
            learned = [torch.randn(shape, requires_grad=True) for _ in range(2 * len(stack.layers))]
            cache, token = stack.new_cache(), {"input_ids": torch.tensor([[5]])}
            for index in range(len(stack.layers)):
                cache.update(*learned[2 * index : 2 * index + 2], index)
        model(**token, past_key_values=cache).logits.square().mean().backward()
        gradients.append([each.grad for each in learned])
    assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("family", ["qwen3", "marian"])
@torch.no_grad()
def test_the_default_device_is_of_no_matter(family, untraced):
    plain, quick = family_pair(family)
    given = prompts(plain)
    with torch.device("meta"):
        found = quick.generate(**given, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, plain.generate(**given, max_new_tokens=5, do_sample=False))
    assert not quick.runtime.decoding.fallbacks.reasons


WRITES = """
import torch
from torch._dynamo.utils import counters
import blockformer
torch.set_num_threads(2)
torch.manual_seed(0)
sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
config = blockformer.preset("qwen3", num_key_value_heads=2, head_dim=8, initializer_range=0.3, **sizes)
model = blockformer.BlockformerDecoderForCausalLM(config).eval()
ids = torch.arange(3, 12).repeat(2, 1)
ways = [dict(inputs=ids[:rows], num_beams=beams, max_new_tokens=9, do_sample=False) for rows, beams in ((1, 1), (2, 3))]
plain = [model.generate(**way) for way in ways]
model.prepare_for_inference(compile=True)
assert all(map(torch.equal, plain, [model.generate(**way) for way in ways]))
assert not model.runtime.decoding.fallbacks.reasons and not model.runtime.decoding.fallbacks.reasons
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"] > 0)
"""


@pytest.mark.slow
def test_a_second_process_writes_by_the_code_of_the_first(processes, tmp_path):
    code = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code"),
    }
    said = []
    for _ in range(2):
        run = processes.run(WRITES, folder=tmp_path, elsewhere=False, **code)
        assert run.returncode == 0, run.stderr
        said.append(run.stdout.split())
    assert int(said[0][-2]) > 0
    assert said[1][-2:] == ["0", "True"]


@pytest.mark.slow
def test_code_on_the_disk_is_not_run_with_shorter_vectors(tmp_path):
    """As on a disk that machines share: PyTorch finds code for long vectors there and compiles it for short ones."""
    has_long = torch.backends.cpu.get_cpu_capability() == "AVX512"
    for instructions in ("avx512", "avx2") if has_long else ("avx2", "default"):
        given = {"ATEN_CPU_CAPABILITY": instructions, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", WRITES], env=os.environ | given, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        assert int(run.stdout.split()[-2]) > 0


def test_without_a_compiler_it_runs_uncompiled(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    plain, quick = pair()
    said = []
    monkeypatch.setattr(step.logger, "warning_once", said.append)
    assert torch.equal(text(quick), text(plain))
    assert len(set(said)) == 1
    assert "no C++ compiler" in said[0]
    assert set(quick.runtime.decoding.fallbacks.reasons) == {step_functions.NO_CODE}


@pytest.mark.parametrize("offload", [accelerate.cpu_offload, lambda model, _: accelerate.cpu_offload_with_hook(model)])
def test_offloaded_after_it_was_prepared_it_runs_uncompiled(offload):
    plain, quick = pair()
    offload(quick, "cpu")
    assert torch.equal(text(quick), text(plain))
    assert not kinds(quick)


def test_what_the_compiler_cannot_do_runs_uncompiled(monkeypatch):
    def fail(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    plain, quick = pair()
    said = []
    monkeypatch.setattr(step_functions.logger, "warning_once", said.append)
    assert torch.equal(text(quick), text(plain))
    assert "compiling it failed" in said[0]
    assert "the disk is full" in said[0]
    assert not kinds(quick)


def test_what_the_compiler_cannot_do_later_runs_uncompiled(untraced, monkeypatch):
    """PyTorch bounds how often it compiles a function, for example for other numbers of threads."""
    plain, quick = pair()
    assert torch.equal(text(quick), text(plain))
    assert kinds(quick)
    computed, calls = StepFunctions.computed, []

    def fail_at_the_third(self, *given):
        calls.append(1)
        if len(calls) == 3:
            raise torch._dynamo.exc.TorchDynamoException("hard failure")
        return computed(self, *given)

    monkeypatch.setattr(StepFunctions, "computed", fail_at_the_third)
    assert torch.equal(text(quick), text(plain))
    assert not kinds(quick)
    assert torch.equal(text(quick), text(plain))
    assert quick.runtime.decoding.fallbacks.reasons == {step_functions.NO_CODE: 2}


@pytest.mark.parametrize("together", [1, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_text_by_weights_of_4_bits_follows_them(dtype, together, monkeypatch):
    monkeypatch.setattr(step_functions, "_SMALL_LAYERS", together)
    plain = low_model(dtype)
    quick = copy.deepcopy(plain).prepare_for_inference(compile=True)
    assert_same_logits(quick, plain)
    assert kinds(quick) == {(1, 1)}
    for model in (plain, quick):
        torch.manual_seed(1)
        for layer in low_of(model):
            layer.qweight.random_(-(2**31), 2**31 - 1)
    assert_same_logits(quick, plain)
    if dtype is torch.float32:
        assert torch.equal(text(quick, 1), text(plain, 1))
        assert torch.equal(text(quick, 1, num_beams=3), text(plain, 1, num_beams=3))
        assert torch.equal(text(quick, 3), text(plain, 3))
        assert torch.equal(text(quick, 3, num_beams=3), text(plain, 3, num_beams=3))
        assert kinds(quick) == {(1, 1), (3, 1)}  # more rows are multiplied by a weight together


def low_model(dtype):
    """A decoder with random weights of 4 bits, two groups of inputs or more."""
    torch.manual_seed(0)
    sizes = {**STRONG, "hidden_size": 128, "intermediate_size": 256}
    model = blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **sizes, linear_bits=4, linear_group_size=64))
    for layer in low_of(model):
        layer.qweight.random_(-(2**31), 2**31 - 1)
        layer.qzeros.fill_(0x77777777)
        layer.scales.uniform_(0.01, 0.05)
    return model.to(dtype).eval()


@torch.no_grad()
def assert_same_logits(quick, plain):
    """Of one more token after a prompt: as near as the dtype goes."""
    ids = token_ids(1, 10, vocab=STRONG["vocab_size"])
    found, expected = one_more_token(quick, ids), one_more_token(plain, ids)
    if plain.dtype is torch.float32:
        assert_close(found, expected)
    else:
        with in_float64(plain) as wide:
            assert_as_exact(found, expected, one_more_token(wide, ids), times=2)


@torch.no_grad()
def test_what_lies_behind_the_keys_counts_for_nothing(untraced, monkeypatch):
    """A step reads keys and values in blocks, beyond the last token's."""
    made = graphs._buffers
    monkeypatch.setattr(graphs, "_buffers", lambda *given: [each.fill_(9.0) for each in made(*given)])
    plain, quick = pair()
    for length in (1, 2, 3, 4, 5, 8, 9):
        ids = token_ids(1, length, vocab=STRONG["vocab_size"])
        ways = {"max_new_tokens": 10, "do_sample": False}
        assert torch.equal(quick.generate(ids, **ways), plain.generate(ids, **ways)), length
    assert kinds(quick) == {(1, 1)}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **STRONG, linear_bits=4, linear_group_size=1)),
     "groups of an even number of inputs; linear_group_size is 1"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make().prepare_for_inference(compile=True)
    with torch.device("meta"):
        model = blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **STRONG))
    with pytest.raises(ValueError, match="for the CPU"):
        model.prepare_for_inference(compile=True)
