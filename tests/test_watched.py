"""Whose code a model is made of."""

import functools

import pytest
import torch
from sizes import STRONG
from torch import nn

import blockformer
from blockformer import preset
from blockformer.watched import Modules, unknown_code

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


def test_a_step_reads_no_dropout_that_is_not_in_training():
    model = blockformer.BlockformerDecoderForCausalLM(preset("gpt2", **STRONG)).eval()
    modules, dropout = Modules(model), model.model.layers[0].dropout
    dropout.p = 0.0
    assert modules.are_untouched()
    dropout.train()
    assert not modules.are_untouched()


def test_a_module_of_both_stacks_is_a_part_of_the_decoder():
    config = preset("t5", **STRONG)
    model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(config).eval()
    model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size).eval())
    modules = Modules(model, without=model.get_encoder())
    model.get_encoder().layers[0].train()
    assert modules.are_untouched()
    model.get_input_embeddings().train()
    assert not modules.are_untouched()


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


@pytest.mark.parametrize("name", ["qwen3", "t5"])
def test_a_model_with_a_weight_that_is_computed_runs_uncompiled(name):
    kind = "DecoderForCausalLM" if name == "qwen3" else "EncoderDecoderForConditionalGeneration"
    torch.manual_seed(0)
    model = getattr(blockformer, f"Blockformer{kind}")(preset(name, **STRONG)).eval()
    nn.utils.parametrizations.weight_norm(model.get_decoder().layers[0].mlp.up_proj)
    expected = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    model.prepare_for_inference(compile=True)
    assert torch.equal(model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False), expected)
    (reason,) = model.runtime.decoding.fallbacks.reasons
    assert "torch.nn.utils.parametrize" in reason
