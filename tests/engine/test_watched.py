"""Whose code a step is compiled of, and by whose attention it attends."""

import functools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sizes import STRONG
from torch import nn
from transformers import AttentionInterface

import blockformer
from blockformer import preset
from blockformer.engine.attention import is_in_use
from blockformer.engine.copies import Following
from blockformer.model.attention import ALL_ATTENTION_FUNCTIONS
from blockformer.watched import unknown_code

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 61,
    "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("name", blockformer.PRESETS)
def test_no_preset_has_code_of_other_packages(name):
    config = preset(name, **({"vocab_size": 60000} if name in ("marian",) else {}))
    kind = "EncoderDecoder" if config.is_encoder_decoder else "Decoder" if config.is_decoder else "Encoder"
    with torch.device("meta"):
        model = getattr(blockformer, f"Blockformer{kind}Model")(config)
    assert unknown_code(model) is None


class Doubled(nn.Linear):
    """A class that its user may edit."""

    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("change", [
    lambda module: setattr(module, "1", Doubled(24, 24)),
    lambda module: setattr(module[1], "function", lambda states: states),
    lambda module: setattr(module[1], "function", functools.partial(lambda states: states)),
    lambda module: setattr(module[1], "function", functools.partial(torch.add, alpha=Doubled(2, 2))),
])  # fmt: skip
def test_code_of_other_packages_is_named(change):
    module = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24))
    assert unknown_code(module) is None
    module[1].function = functools.partial(nn.functional.gelu, approximate="tanh")
    assert unknown_code(module) is None
    change(module)
    assert "test_watched." in unknown_code(module)


def test_a_model_with_code_of_another_package_runs_uncompiled():
    torch.manual_seed(0)
    model = blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **STRONG)).eval()
    model.model.layers[0].mlp.up_proj = Doubled(STRONG["hidden_size"], STRONG["intermediate_size"], bias=False)
    expected = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    model.prepare_for_inference(compile=True)
    assert torch.equal(model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False), expected)
    (reason,) = model.runtime.decoding.fallbacks.reasons
    assert "test_watched.Doubled" in reason


def test_only_our_attention_is_compiled(monkeypatch):
    model = blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **SIZES))
    assert is_in_use(model.config)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", lambda *given, **more: None)
    assert not is_in_use(model.config)
    monkeypatch.undo()
    model.set_attn_implementation("eager")
    assert not is_in_use(model.config)


@torch.no_grad()
def test_another_attention_than_ours_is_attended_by(untraced, monkeypatch):
    """Also once steps have been compiled."""
    model = (
        blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **SIZES)).eval().prepare_for_inference(compile=True)
    )
    ids, called = torch.tensor([[3, 4, 5, 6]]), []
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sharper(module, query, *given, scaling, **more):
        called.append(module)
        return ours(module, query, *given, scaling=3 * scaling, **more)

    def written():
        return model.generate(ids, max_new_tokens=3, do_sample=False, output_scores=True, return_dict_in_generate=True)

    first = written()
    monkeypatch.setitem(AttentionInterface._global_mapping, "sharper", sharper)
    model.set_attn_implementation("sharper")
    second = written()
    assert called
    assert not torch.allclose(first.scores[0], second.scores[0])
    model.set_attn_implementation("sdpa")
    assert all(map(torch.equal, written().scores, first.scores))


@pytest.mark.parametrize("shape", [(64, 96), (130, 77), (48, 1000)])
def test_a_write_through_data_to_some_rows_or_columns_is_seen(shape):
    """As whoever takes out a head writes, which PyTorch does not count."""
    layer = nn.Linear(shape[1], shape[0])
    places = [(layer._parameters, "weight")]
    for dim in (0, 1, 0):
        layer.weight.data = layer.weight.data.t()  # some adapters leave one that is not contiguous
        for part in layer.weight.data.chunk(8, dim):
            made: list = []
            copy = SimpleNamespace(holders=places, make=partial(made.append, 1))
            held = Following([copy], sampled=True)
            for _ in range(2):
                held.refresh()
            assert made == [1]
            part.add_(1)
            held.refresh()
            assert made == [1, 1]
