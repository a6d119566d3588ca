"""Latent attention of a prepared model: one more token is compared with the cached vectors as they are."""

import copy
import itertools

import pytest
import torch
from pairs import assert_close, latent_pair, left_padded, token_ids
from peft import LoraConfig, get_peft_model

import blockformer
from blockformer import BlockformerDecoderConfig, BlockformerDecoderForCausalLM
from blockformer.engine.attention import PreparedLatentAttention
from blockformer.engine.packed import PackedLinear
from blockformer.model.latent_attention import LatentAttention


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Ours and transformers' model with the same weights."""
    return latent_pair(tmp_path_factory.mktemp("latent"), attention_bias=True)


def layers_of(model):
    return [layer.self_attn for layer in model.base_model.layers]


@torch.no_grad()
def logits_of_steps(model, ids, mask, start=5, **given):
    """The logits of the last tokens, each by a step of its own: [B, T - start, V]."""
    cache = model(ids[:, :start], attention_mask=mask[:, :start], use_cache=True).past_key_values
    found = []
    for end in range(start + 1, ids.shape[1] + 1):
        output = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache, **given)
        found.append(output.logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_steps_give_the_logits_of_transformers(pair, rows, attention):
    ours, theirs = copy.deepcopy(pair[0]).prepare_for_inference(), pair[1]
    ours.set_attn_implementation(attention)
    assert {type(layer) for layer in layers_of(ours)} == {PreparedLatentAttention}
    ids, mask = left_padded(rows, 11)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[:, 5:]
    real = mask[:, 5:].bool()
    assert_close(logits_of_steps(ours, ids, mask)[real], expected[real])


def test_a_step_makes_no_keys_and_no_values(pair, monkeypatch):
    ours = copy.deepcopy(pair[0]).prepare_for_inference()
    ids = token_ids(2, 6)
    with torch.no_grad():
        cache = ours(ids[:, :5], use_cache=True).past_key_values
        expected = ours(ids).logits[:, 5:]
        calls, call = [], torch.nn.Linear.__call__
        monkeypatch.setattr(torch.nn.Linear, "__call__", lambda self, states: calls.append(self) or call(self, states))
        output = ours(ids[:, 5:], past_key_values=cache).logits
    assert not set(calls) & {part for layer in layers_of(ours) for part in (layer.k_proj, layer.v_proj)}
    assert set(calls) > {layer.o_proj for layer in layers_of(ours)}
    assert_close(output, expected)


def test_weights_that_are_read_stay_plain_and_training_brings_the_class_back():
    config = BlockformerDecoderConfig(
        vocab_size=64, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8, head_dim=64,
        kv_lora_rank=256, rope_parameters={"partial_rotary_factor": 0.5},
    )  # fmt: skip
    torch.manual_seed(0)
    model = BlockformerDecoderForCausalLM(config).eval()
    expected = copy.deepcopy(model)
    model.prepare_for_inference()
    (layer,) = layers_of(model)
    assert not {type(layer.k_proj), type(layer.v_proj)} & {PackedLinear}
    ids, mask = token_ids(1, 9, vocab=64), torch.ones(1, 9, dtype=torch.long)
    assert_close(logits_of_steps(model, ids, mask), logits_of_steps(expected, ids, mask))
    model.prepare_for_training()
    assert type(layers_of(model)[0]) is LatentAttention


def test_adapters_and_hooks_of_what_makes_keys_count(pair):
    ours = copy.deepcopy(pair[0]).prepare_for_inference()
    ids, mask = token_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    before = logits_of_steps(ours, ids, mask)
    handle = layers_of(ours)[0].v_proj.register_forward_hook(lambda module, args, output: 2 * output)
    with torch.no_grad():
        assert_close(logits_of_steps(ours, ids, mask), ours(ids).logits[:, 5:])
    handle.remove()
    adapted = get_peft_model(ours, LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)).eval()
    with torch.no_grad():
        whole = adapted(ids).logits[:, 5:]
        steps = logits_of_steps(adapted.base_model.model, ids, mask)
    assert not torch.allclose(steps, before, rtol=1e-2)
    assert_close(steps, whole)


def test_hooks_of_all_modules_see_what_makes_keys(pair):
    ours, ids, mask = (
        copy.deepcopy(pair[0]).prepare_for_inference(),
        token_ids(2, 9),
        torch.ones(2, 9, dtype=torch.long),
    )
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    logits_of_steps(ours, ids, mask, start=8)
    handle.remove()
    parts = [part for layer in layers_of(ours) for part in (layer.k_proj, layer.v_proj)]
    assert {seen.count(part) for part in parts} == {2}  # by the prompt, and by the step


def test_another_thread_that_begins_to_trace_does_not_matter(pair, monkeypatch):
    """PyTorch says "compiling" in all threads, and may begin to between any two lines."""
    ours, ids, mask = (
        copy.deepcopy(pair[0]).prepare_for_inference(),
        token_ids(2, 9),
        torch.ones(2, 9, dtype=torch.long),
    )
    expected, answers = logits_of_steps(ours, ids, mask), itertools.cycle([False, True, True])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: next(answers))
    assert torch.equal(logits_of_steps(ours, ids, mask), expected)


def test_a_masked_head_adds_nothing_to_a_step(pair):
    ours = copy.deepcopy(pair[0]).prepare_for_inference()
    ids = token_ids(2, 9)
    heads = torch.ones(3, 4)
    heads[:, 2] = 0
    plain = copy.deepcopy(pair[0])
    with torch.no_grad():
        cache = plain(ids[:, :8], use_cache=True).past_key_values
        expected = plain(ids[:, 8:], past_key_values=cache, head_mask=heads).logits
        cache = ours(ids[:, :8], use_cache=True).past_key_values
        assert_close(ours(ids[:, 8:], past_key_values=cache, head_mask=heads).logits, expected)


def test_in_bfloat16_it_is_as_exact_as_the_plain_way(pair):
    exact = copy.deepcopy(pair[0]).double()
    plain, ours = (copy.deepcopy(pair[0]).bfloat16() for _ in range(2))
    ours.prepare_for_inference()
    ids, mask = token_ids(4, 12), torch.ones(4, 12, dtype=torch.long)
    expected, usual, found = (logits_of_steps(each, ids, mask).double() for each in (exact, plain, ours))
    assert (found - expected).abs().mean() < 1.5 * (usual - expected).abs().mean()


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_are_those_of_transformers(pair, beams):
    ours, theirs = copy.deepcopy(pair[0]).prepare_for_inference(), pair[1]
    ids, mask = left_padded(3, 9)
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "attention_mask": mask}
    assert torch.equal(ours.generate(ids, **settings), theirs.generate(ids, **settings))


def test_an_exported_repo_has_only_the_plain_way(pair, tmp_path):
    ours = copy.deepcopy(pair[0]).prepare_for_inference()
    blockformer.export_model(ours, tmp_path / "repo")
    again = BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "repo")
    assert {type(layer) for layer in layers_of(again)} == {LatentAttention}
    ids = token_ids(1, 6)
    assert torch.equal(again(ids).logits, pair[0](ids).logits)
