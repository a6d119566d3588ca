"""What a model asks its runtime, and that nothing else decides how it runs."""

import ast
import copy
import inspect
from pathlib import Path

import pytest
import torch
from pairs import assert_close, model, token_ids
from torch import nn
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import blockformer
from blockformer.engine.runtime import LoadedRuntime, TrainingRuntime
from blockformer.model import modeling_decoder, modeling_encoder, modeling_encoder_decoder
from blockformer.model.attention import Attention
from blockformer.model.compat import CACHE
from blockformer.model.configuration_blockformer import BlockformerConfig
from blockformer.model.feed_forward import FeedForward
from blockformer.model.language_model_head import LanguageModelHead
from blockformer.model.layer import Layer, StackInputs
from blockformer.model.pretrained_model import BlockformerPreTrainedModel
from blockformer.model.runtime import Runtime
from blockformer.model.stack import Stack

ROOT = Path(blockformer.__file__).parent
CLASSES = {BlockformerPreTrainedModel, BlockformerConfig, Attention, FeedForward, LanguageModelHead, Layer, Stack} | {
    each
    for module in (modeling_decoder, modeling_encoder, modeling_encoder_decoder)
    for _, each in inspect.getmembers(module, inspect.isclass)
    if each.__module__ == module.__name__
}
LIBRARY = {PreTrainedModel, GenerationMixin, PretrainedConfig, nn.Module, nn.Linear, nn.Embedding, DynamicCache}


def is_from_above(function) -> bool:
    """Whether code of the package's folders is in a function, or in what wraps it."""
    while function is not None:
        path = Path(function.__code__.co_filename)
        if ROOT in path.parents and path.parent != ROOT / "model":
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@pytest.mark.parametrize(
    "kind", sorted(CLASSES | LIBRARY, key=lambda each: each.__name__), ids=lambda each: each.__name__
)
def test_the_package_replaces_no_method_of_a_class(kind):
    functions = {name: getattr(each, "__func__", each) for name, each in vars(kind).items()}
    assert not {name for name, each in functions.items() if inspect.isfunction(each) and is_from_above(each)}


def test_no_code_sets_an_attribute_of_a_class():
    """After its body. `cls` in `__init_subclass__` and in decorators is a class that is being made."""
    found = []
    for path in (*ROOT.rglob("*.py"), *Path(blockformer.conversion.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
                targets = [ast.Attribute(node.args[0])]
            owners = [target.value for target in targets if isinstance(target, ast.Attribute)]
            found += [f"{path}:{node.lineno}" for each in owners if names_a_class(getattr(each, "id", ""))]
    assert found == []


def names_a_class(name: str) -> bool:
    """Whether a name is spelt as those of classes are, which constants are not."""
    return name.lstrip("_")[:1].isupper() and not name.isupper()


def test_such_a_method_would_be_found(monkeypatch):
    monkeypatch.setattr(Stack, "new_cache", LoadedRuntime.loss)
    with pytest.raises(AssertionError):
        test_the_package_replaces_no_method_of_a_class(Stack)


class Watch(LogitsProcessor):
    """Notes the classes of all modules at each token."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def __call__(self, input_ids, scores):
        self.seen.append([type(module) for module in self.model.modules()])
        return scores


@torch.no_grad()
def test_no_layer_has_another_class_while_a_model_writes():
    ours = model("qwen3", hidden_size=512, intermediate_size=1024)
    before, watch = [type(module) for module in ours.modules()], Watch(ours)
    ours.generate(token_ids(1, 5), max_new_tokens=4, logits_processor=LogitsProcessorList([watch]))
    assert watch.seen == [before] * 4


@pytest.mark.parametrize("family", ["qwen3", "t5"])
@torch.no_grad()
def test_a_plain_runtime_writes_the_same_text(family):
    """That of a repo which runs its own code."""
    cls = blockformer.BlockformerEncoderDecoderForConditionalGeneration if family == "t5" else None
    ours = model(family, **({} if cls is None else {"cls": cls, "decoder_start_token_id": 0}))
    assert type(ours.runtime) is LoadedRuntime
    plain = copy.deepcopy(ours)
    for module in plain.modules():
        if isinstance(module, BlockformerPreTrainedModel):
            module.runtime = Runtime()
    given = {"max_new_tokens": 30, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    first, second = (each.generate(token_ids(2, 40), **given) for each in (ours, plain))
    assert all(map(torch.equal, first.scores, second.scores))
    caches = [getattr(each.past_key_values, "self_attention_cache", each.past_key_values) for each in (first, second)]
    assert [type(cache) for cache in caches] == [DynamicCache] * 2
    quick = ours.prepare_for_inference()
    given.pop("output_scores")
    third = quick.generate(token_ids(2, 40), **given)
    assert torch.equal(third.sequences, second.sequences)
    cache = getattr(third.past_key_values, "self_attention_cache", third.past_key_values)
    for one, other in zip(cache.layers, caches[1].layers, strict=True):
        assert type(one) is type(other)
        assert_close(one.keys, other.keys)


@pytest.mark.parametrize("family", ["qwen3", "t5"])
@torch.no_grad()
def test_the_cache_is_the_library_s_with_fast_paths_off(family, monkeypatch):
    cls = blockformer.BlockformerEncoderDecoderForConditionalGeneration if family == "t5" else None
    ours = model(family, **({} if cls is None else {"cls": cls, "decoder_start_token_id": 0})).prepare_for_inference()
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    given = {"max_new_tokens": 3, "num_beams": 2, "do_sample": False, "return_dict_in_generate": True}
    cache = ours.generate(token_ids(2, 40), **given).past_key_values
    caches = [cache] if family == "qwen3" else [cache.self_attention_cache, cache.cross_attention_cache]
    assert {type(layer).__name__ for each in caches for layer in each.layers} == {"DynamicLayer"}


def test_a_prepared_model_has_a_runtime_of_its_own():
    ours = model("qwen3")
    ours.prepare_for_inference(compile=True)
    assert ours.runtime.decoding is not None
    other = copy.deepcopy(ours)
    assert other.runtime is not ours.runtime
    assert other.runtime.decoding is not ours.runtime.decoding
    assert other.runtime.decoding.steps is not ours.runtime.decoding.steps
    ours.prepare_for_training()
    assert type(ours.runtime) is TrainingRuntime
    assert type(ours.model.runtime) is TrainingRuntime
    assert other.runtime.decoding is not None


@pytest.mark.parametrize("kind", ["dynamic", "both", "static", "window", "eager"])
@pytest.mark.parametrize("hides", [False, True])
def test_the_masks_of_a_step_are_the_library_s(kind, hides):
    """Masks are made by the library, except where one token on "sdpa" needs none: there it makes none either."""
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
    make = create_sliding_window_causal_mask if kind == "window" else create_causal_mask
    own = make(config=stack.config, inputs_embeds=step.hidden_states, attention_mask=mask, **{CACHE: cache})
    for runtime in (stack.runtime, Runtime()):
        (found,) = runtime.plan(stack, step).masks.values()
        assert (found is None) == (own is None)
        assert own is None or torch.equal(found, own)
    assert hides or kind not in ("dynamic", "both") or found is None
