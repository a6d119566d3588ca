"""nnsight and TransformerLens see and change what our own hooks do, bit for bit. Run where they are installed.

`make clients CLIENTS="nnsight transformer-lens"` makes their environments in .venvs/.
"""

import page_blocks
import pytest
import torch
from example_files import load
from narrow_models import small
from own_blocks import RESIDUAL, forgotten_after

import blockformer

MIXES = {
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "gpt2": ("gpt2", {}),
    "norms on both sides": ("gemma2", {}),
    "norms behind": ("olmo2", {}),
    "norms after the sum": ("article-gpt", {}),
    "parallel": ("gpt_neox", {}),
    "parallel, one norm": ("cohere", {}),
    "alibi": ("bloom", {}),
    "experts": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 8}),
    "sinks": ("gpt_oss", {"num_experts": 4}),
    "a residual of one's own": ("gpt2", {"residual": "rezero"}),
    "of no family": ("qwen3", {"norm_type": "layer_norm", "gated_mlp": False, "norm_placement": "pre_output"}),
    "bert": ("bert", {}),
    "modernbert": ("modernbert", {}),
}
IDS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MIXES)
def model(request):
    with forgotten_after():
        blockformer.register(RESIDUAL)
        yield model_of(*MIXES[request.param])


def model_of(preset, settings):
    config = small(preset, initializer_range=0.3, **settings)
    name = "DecoderForCausalLM" if config.is_decoder else "EncoderForMaskedLM"
    torch.manual_seed(0)
    made = getattr(blockformer, f"Blockformer{name}")(config).eval()
    made.set_attn_implementation("eager")
    return made


@torch.no_grad()
def by_our_hooks(model):
    """Each layer's input, what its heads give together and their attention; the logits, also without a head."""
    heads = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, inputs, index=index: heads.__setitem__(index, inputs[0].clone())
        )
        for index, layer in enumerate(model.model.layers)
    ]
    outputs = model(IDS, output_hidden_states=True, output_attentions=True)
    for hook in hooks:
        hook.remove()
    mask = torch.ones(len(heads), model.config.num_attention_heads)
    mask[1, 1] = 0.0
    without = model(IDS, head_mask=mask).logits
    stream = outputs.hidden_states[: len(heads)]
    return [*stream, *heads.values(), *outputs.attentions, outputs.logits, without]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for index, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(ours, theirs), index


@torch.no_grad()
def test_transformer_lens_sees_and_changes_what_our_hooks_do(model):
    pytest.importorskip("transformer_lens")
    expected, size = by_our_hooks(model), model.config.head_dim
    lens = load("look_inside").bridge(model)
    logits, cache = lens.run_with_cache(IDS)
    layers = range(len(model.model.layers))

    def take_out(heads, hook):
        assert heads.shape[-1] == size
        heads[:, :, 1] = 0.0
        return heads

    found = [cache[f"blocks.{layer}.hook_resid_pre"] for layer in layers]
    found += [cache[f"blocks.{layer}.attn.hook_z"].flatten(2) for layer in layers]
    found += [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in layers]
    found += [logits, lens.run_with_hooks(IDS, fwd_hooks=[("blocks.1.attn.hook_z", take_out)])]
    assert_same(found, expected)


@torch.no_grad()
def test_compatibility_mode_keeps_what_the_model_says(model):
    """It centres the head, which moves all logits of a token alike."""
    pytest.importorskip("transformer_lens")
    expected = model(IDS).logits.log_softmax(-1)
    lens = load("look_inside").bridge(model)
    lens.enable_compatibility_mode()
    torch.testing.assert_close(lens(IDS).log_softmax(-1), expected, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_nnsight_sees_and_changes_what_our_hooks_do(model):
    nnsight = pytest.importorskip("nnsight")
    expected, size = by_our_hooks(model), model.config.head_dim
    inside = nnsight.NNsight(model)
    with inside.trace(IDS):
        stream, heads, patterns = list().save(), list().save(), list().save()  # noqa: C408
        for layer in inside.model.layers:
            stream.append(layer.input)
            heads.append(layer.self_attn.o_proj.input)
            patterns.append(layer.self_attn.output[1])
        logits = inside.lm_head.output.save()
    with inside.trace(IDS):
        inside.model.layers[1].self_attn.o_proj.input[..., size : 2 * size] = 0.0
        without = inside.lm_head.output.save()
    if model.config.final_logit_softcapping is not None:  # nnsight sees the head itself
        logits, without = (_capped(model, each) for each in (logits, without))
    assert_same([*stream, *heads, *patterns, logits, without], expected)


def repo_of_the_page(tokenizer):
    """`my-model` where the test is, with heads of the size that the page says."""
    config = small("qwen3", vocab_size=len(tokenizer), hidden_size=64, num_attention_heads=4, head_dim=16)
    torch.manual_seed(0)
    model = blockformer.BlockformerDecoderForCausalLM(config).eval()
    blockformer.export_model(model, "my-model", tokenizer=tokenizer)
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def test_the_block_on_nnsight_runs(tmp_path, tiny_tokenizer, monkeypatch):
    pytest.importorskip("nnsight")
    monkeypatch.chdir(tmp_path)
    model, ids = repo_of_the_page(tiny_tokenizer), torch.tensor([tiny_tokenizer("A text.").input_ids])
    found = page_blocks.run("clients.md", "# needs nnsight")
    outputs = model(ids, output_hidden_states=True, output_attentions=True)
    mask = torch.ones(len(model.model.layers), 4)
    mask[0, 1] = 0
    assert_same(found["patterns"], list(outputs.attentions))
    assert_same(found["stream"][:-1], list(outputs.hidden_states[1:-1]))
    assert_same([found["logits"]], [model(ids, head_mask=mask).logits])


@torch.no_grad()
def test_the_block_on_transformer_lens_runs(tmp_path, tiny_tokenizer, monkeypatch):
    pytest.importorskip("transformer_lens")
    load("look_inside")  # which the block imports
    monkeypatch.chdir(tmp_path)
    model = repo_of_the_page(tiny_tokenizer)
    found = page_blocks.run("clients.md", "# needs transformer_lens")
    outputs = model(torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True, output_attentions=True)
    cache = found["cache"]
    assert_same([found["logits"]], [outputs.logits])
    assert_same([cache["blocks.0.hook_resid_post"]], [outputs.hidden_states[1]])
    assert_same([cache["blocks.0.attn.hook_pattern"]], [outputs.attentions[0]])


def _capped(model, logits):
    cap = model.config.final_logit_softcapping
    return cap * torch.tanh(logits / cap)


def test_the_example_says_which_head_is_worth_most(tmp_path, tiny_tokenizer, capsys, monkeypatch):
    pytest.importorskip("transformer_lens")
    monkeypatch.setenv("COLUMNS", "160")
    example = load("look_inside")
    config = small("qwen3", vocab_size=len(tiny_tokenizer), initializer_range=0.3)
    torch.manual_seed(0)
    model = blockformer.BlockformerDecoderForCausalLM(config)
    blockformer.export_model(model, tmp_path / "repo", tokenizer=tiny_tokenizer)
    text = "a b c a b c"
    example.main([str(tmp_path / "repo"), text])
    output = capsys.readouterr().out
    worth = example.worth_of_heads(
        example.bridge(model.eval()), ids := tiny_tokenizer(text, return_tensors="pt")["input_ids"], ids
    )
    assert worth.shape == (2, 2)
    assert "head 1" in output
    assert "worth most: head" in output
