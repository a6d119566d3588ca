"""Pruned heads: narrower layers that compute what the mask of these heads does."""

import json

import pytest
import torch
from pairs import assert_close
from sizes import TINY
from strategies import draw_weights
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import blockformer
from blockformer import preset, prune_heads, restore_heads

DEEPER = {**TINY, "vocab_size": 61, "num_hidden_layers": 3}
GROUPED = {**DEEPER, "num_key_value_heads": 2, "head_dim": 8}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
HEADS = {0: [2, 3], 2: [0, 1]}
IDS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))
PADDED = (torch.arange(9) < torch.tensor([[9], [5]])).long()
# What has something for each head: absolute, relative and rotary positions, norms, sinks, soft caps, gates, biases.
SETTINGS = {
    "bert": DEEPER,
    "bert relative_key_query": {**DEEPER, "position_type": "relative_key_query"},
    "bert relative_bias": {**DEEPER, "position_type": "relative_bias"},
    "bert relative_bias_per_layer": {
        **DEEPER,
        "position_type": "relative_bias",
        "relative_bias_per_layer": True,
    },
    "bert-decoder": {**DEEPER, "add_cross_attention": True},
    "gpt2": DEEPER,
    "bloom": DEEPER,
    "qwen3": {**GROUPED, "attention_gate": True},
    "cohere": {**GROUPED, "qk_norm": "per_head"},
    "gemma2": {**GROUPED, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "gpt_oss": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
}


def model_of(name, seed=0, **changes):
    config = preset(name.split()[0], **{**SETTINGS[name], **NO_TOKENS, **changes})
    encoder, decoder = blockformer.BlockformerEncoderForMaskedLM, blockformer.BlockformerDecoderForCausalLM
    return draw_weights((decoder if config.is_decoder else encoder)(config), seed)


def mask_of(model, heads=HEADS):
    mask = torch.ones(model.config.num_hidden_layers, model.config.num_attention_heads)
    for layer, gone in heads.items():
        mask[layer, gone] = 0
    return mask


@torch.no_grad()
def logits(model, **inputs):
    if model.config.add_cross_attention:
        every = torch.ones(model.config.num_hidden_layers, model.config.num_attention_heads)
        inputs |= {"encoder_hidden_states": torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))}
        inputs.setdefault("cross_attn_head_mask", every)
    return model(input_ids=IDS, **inputs).logits


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_pruned_model_computes_what_masked_heads_do(name, backend):
    model = model_of(name)
    model.set_attn_implementation(backend)
    pruned = prune_heads(model, HEADS)
    assert pruned.config._attn_implementation == backend
    assert (model.config.pruned_heads, pruned.config.pruned_heads) == (None, HEADS)
    widths = [layer.self_attn.q_proj.out_features for layer in pruned.get_decoder().layers]
    assert widths == [16, 32, 16]
    assert pruned.num_parameters() < model.num_parameters()
    for inputs in ({}, {"attention_mask": PADDED}):
        wanted = logits(model, head_mask=mask_of(model), **inputs)
        assert not torch.allclose(wanted, logits(model, **inputs), atol=0.01)
        got = logits(pruned, **inputs)
        real = inputs.get("attention_mask", torch.ones_like(IDS)) == 1
        assert_close(got[real], wanted[real])
    # Heads keep their numbers, in masks and in what is pruned later.
    more = {1: [0, 1], **HEADS}
    once, mask = logits(model, head_mask=mask_of(model, more)), mask_of(model, {1: [0, 1]})
    assert_close(logits(pruned, head_mask=mask), once)
    assert_close(logits(prune_heads(pruned, {0: [2, 3], 1: [0, 1]})), once)
    whole = restore_heads(pruned)
    assert whole.config.pruned_heads is None
    assert whole.num_parameters() == model.num_parameters()
    assert_close(logits(whole), logits(pruned))


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bloom", "gpt_oss", "gemma2"])
def test_a_pruned_model_writes_with_every_cache_and_learns(name):
    pruned = prune_heads(model_of(name), HEADS)
    told = {"max_new_tokens": 6, "do_sample": False, "attention_mask": PADDED.flip(1)}
    text = pruned.generate(IDS, use_cache=False, **told)
    for settings in ({}, {"cache_implementation": "static"}):
        assert torch.equal(pruned.generate(IDS, **told, **settings), text)
    beams = [pruned.generate(IDS, use_cache=cached, num_beams=3, **told) for cached in (True, False)]
    assert torch.equal(*beams)
    pruned.train()(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in pruned.model.layers[0].self_attn.parameters())


def assert_prepared_is_the_same(name, dtype, **settings):
    pruned = prune_heads(model_of(name).to(dtype), HEADS)
    wanted = logits(pruned, attention_mask=PADDED)[PADDED == 1]
    prepared = blockformer.prepare_for_inference(pruned, **settings)
    for _ in range(2):
        got = logits(prepared, attention_mask=PADDED)[PADDED == 1]
        assert_close(got, wanted, **({"tolerance": 0.03} if dtype == torch.bfloat16 else {}))
    again = prune_heads(prepared, {1: [0, 1]})
    assert again.config.pruned_heads == {**HEADS, 1: [0, 1]}


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("bert", torch.bfloat16)]
)
def test_a_prepared_pruned_model_is_the_same(name, dtype):
    assert_prepared_is_the_same(name, dtype)


LOADED = """
import sys, torch, transformers
folder, auto_class = sys.argv[1:]
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
given = torch.load(folder + "/given.pt")
assert "blockformer" not in sys.modules
with torch.no_grad():
    found = model(given["input_ids"]).logits
    masked = model(given["input_ids"], head_mask=torch.ones(3, 4)).logits
print(torch.equal(found, given["logits"]) and torch.equal(masked, found), model.config.pruned_heads)
"""


@pytest.mark.versions
@pytest.mark.parametrize(("name", "auto_class"), [("qwen3", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM)])
def test_a_pruned_repo_needs_no_package(tmp_path, fresh, name, auto_class):
    pruned = prune_heads(model_of(name), HEADS)
    repo = tmp_path / "repo"
    blockformer.export_model(pruned, repo)
    assert json.loads((repo / "config.json").read_text())["pruned_heads"] == {"0": [2, 3], "2": [0, 1]}
    loaded = auto_class.from_pretrained(repo)
    assert loaded.config.pruned_heads == HEADS
    assert torch.equal(logits(loaded), logits(pruned))
    torch.save({"input_ids": IDS, "logits": logits(pruned)}, repo / "given.pt")
    assert fresh(LOADED, repo, auto_class.__name__, folder=tmp_path) == f"True {HEADS}"


def test_a_classifier_keeps_its_labels_and_is_not_changed():
    config = preset(
        "bert", **DEEPER, id2label={0: "no", 1: "yes", 2: "none"}, problem_type="multi_label_classification"
    )
    model = draw_weights(blockformer.BlockformerEncoderForSequenceClassification(config), 0)
    before = logits(model)
    pruned = prune_heads(model, {1: [0]})
    assert pruned.config.id2label == model.config.id2label
    assert pruned.config.problem_type == "multi_label_classification"
    with torch.no_grad():
        for parameter in pruned.parameters():
            parameter.zero_()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("name", "changes", "heads", "message"),
    [
        ("gpt2", {}, {0: [4]}, "pruned_heads must be some of 4 heads"),
        ("gpt2", {}, {3: [0]}, "for each of some of 3 layers, .*, not \\[0\\] for layer 3"),
        ("gpt2", {}, {0: [0, 1, 2, 3]}, "pruned_heads must be some of 4 heads"),
        ("gpt2", {}, {0: [-1]}, "pruned_heads must be some of 4 heads"),
        ("qwen3", {}, {0: [1, 2]}, "with all heads that share a key"),
        ("qwen3", {"qk_norm": "projection"}, HEADS, "not supported with qk_norm='projection'"),
    ],
)
def test_what_cannot_be_pruned_is_refused(name, changes, heads, message):
    with pytest.raises(ValueError, match=message):
        prune_heads(model_of(name, **changes), heads)


def test_heads_without_their_layers_are_refused():
    with pytest.raises(TypeError, match=r"heads must map layers to their heads, .*, not \[0\]"):
        prune_heads(model_of("gpt2"), [0])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("t5", {}, "or in an encoder-decoder"),
        ("albert", {}, r"num_hidden_groups \(1\) needs layers that share all settings"),
        ("deberta-v2", {}, "leave out num_key_value_heads and pruned_heads"),
        ("llama", {"linear_bits": 4, "linear_group_size": 32}, "not supported with float32_down_proj or pruned_heads"),
        ("gpt2", {"pruned_heads": [0]}, "pruned_heads must be a dict, layer -> list of heads, not"),
        ("gpt2", {"pruned_heads": {"first": [0]}}, "layer -> list of heads"),
        ("gpt2", {"pruned_heads": {0: 1}}, "layer -> list of heads"),
        ("gpt2", {"pruned_heads": {0: [1, 1]}}, "not \\[1, 1\\] for layer 0"),
    ],
)
def test_configs_of_pruned_heads_that_are_refused(name, settings, message):
    sizes = {**DEEPER, "intermediate_size": 64, **NO_TOKENS}
    with pytest.raises(ValueError, match=message):
        preset(name, **{**sizes, "pruned_heads": {0: [1]}, **settings})


def test_others_are_told_what_they_cannot_do_with_it():
    pruned = prune_heads(model_of("qwen3"), HEADS)
    with pytest.raises(TypeError, match="Linear is not a model of this package"):
        prune_heads(torch.nn.Linear(2, 2), HEADS)
    with pytest.raises(ValueError, match="restore_heads"):
        blockformer.reshape(pruned, kv_heads=1)
    with pytest.raises(ValueError, match="compile=True with pruned_heads needs an encoder"):
        blockformer.prepare_for_inference(pruned, compile=True)
    pruned.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ValueError, match="does not support a layer of fewer heads"):
        pruned(IDS)


def test_layers_that_stay_keep_their_heads():
    pruned = prune_heads(model_of("qwen3"), HEADS)
    less = blockformer.reshape(pruned, layers=[2, 1])
    assert less.config.pruned_heads == {0: [0, 1]}
    encoder = blockformer.reshape(pruned, topology="encoder")
    assert encoder.config.pruned_heads == HEADS


def test_heads_by_their_gradients():
    """The recipe of docs/reshaping.md."""
    model = model_of("bert")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 8:16] = 0  # a head that says nothing
    mask = torch.ones(3, 4, requires_grad=True)
    model(IDS, head_mask=mask, labels=IDS).loss.backward()
    assert mask.grad.abs().argmin() == 5
