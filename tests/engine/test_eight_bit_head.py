"""A head in 8 bits: compiled steps read it within the stated tolerance, and it follows the head's weight."""

import copy

import pytest
import torch
from pairs import assert_close, token_ids
from sizes import STRONG
from torch import nn

import blockformer
from blockformer import preset
from blockformer.engine import compiled, origin
from blockformer.engine.eight_bit_head import EightBitHead
from blockformer.engine.linear import QuickLinear
from blockformer.engine.measure import own_trace
from blockformer.engine.step_parts import LastPart

LARGE_VOCABULARY = {**STRONG, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 1003, "initializer_range": 0.3}

# On a busy machine the compiler may take minutes for one step.
pytestmark = [pytest.mark.usefixtures("folder"), pytest.mark.timeout(1200)]


def make(family="qwen3", dtype=torch.float32, cls=blockformer.BlockformerDecoderForCausalLM, **settings):
    torch.manual_seed(0)
    return cls(preset(family, **LARGE_VOCABULARY, **settings)).to(dtype).eval()


def head_of(bias, dtype):
    """A head with its copy, and its plain twin."""
    torch.manual_seed(0)
    plain = nn.Linear(256, 5000, bias, dtype=dtype)
    nn.init.normal_(plain.weight)
    head = copy.deepcopy(plain)
    head.__class__ = EightBitHead
    head.refresh()
    return head, plain


def assert_within_tolerance(found, right):
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    error, spread = (found - right).float(), right.float().std()
    assert 0.001 * spread < error.square().mean().sqrt() < 0.01 * spread  # rounded, and no more than it says
    assert error.abs().max() < 0.06 * spread


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_few_rows_are_within_the_tolerance(bias, dtype):
    head, plain = head_of(bias, dtype)
    for shape in ((1, 1), (4, 1)):
        states = torch.randn(*shape, 256, dtype=dtype)
        with own_trace():
            assert_within_tolerance(head(states), plain(states))


@torch.no_grad()
def test_many_rows_and_calls_outside_of_a_graph_are_exact():
    head, plain = head_of(True, torch.bfloat16)
    states = torch.randn(5, 1, 256, dtype=torch.bfloat16)
    with own_trace():
        assert torch.equal(head(states), plain(states))
    assert torch.equal(head(states[:1]), plain(states[:1]))


@torch.no_grad()
def test_rows_of_zeros_and_of_what_is_not_finite():
    head, plain = head_of(False, torch.float32)
    for each in (head, plain):
        each.weight[0], each.weight[1, 0], each.weight[2, 3] = 0.0, torch.nan, torch.inf
    head.refresh()
    states = torch.ones(1, 256)
    with own_trace():
        found = head(states)[0]
    assert found[0] == 0.0
    assert not found[1:3].isfinite().any()
    assert_within_tolerance(found[3:], plain(states)[0, 3:])


@torch.no_grad()
def test_the_copy_follows_the_weight_and_is_in_no_file():
    head, plain = head_of(False, torch.float32)
    kept, made = head.rounded_weight, origin.last_made()
    head.refresh()
    assert origin.last_made() is made
    states = torch.randn(1, 1, 256)
    for change in (
        lambda layer: layer.weight.mul_(torch.linspace(1, 2, 256)),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.flip(0))),
        lambda layer: setattr(layer.weight, "data", layer.weight.flip(1)),
    ):
        change(head), change(plain)
        head.refresh()
        with own_trace():
            assert_within_tolerance(head(states), plain(states))
        assert head.rounded_weight is kept  # compiled code has read this one
    other = copy.deepcopy(head)
    assert other._origin is None
    for _ in range(head.weight._version):  # its writes are counted anew
        other.weight.mul_(-1.01)
    other.refresh()
    with own_trace():
        assert_within_tolerance(other(states), nn.functional.linear(states, other.weight))
    assert head.to(torch.bfloat16).row_scales.dtype is torch.float32  # a cast is none of the copy's
    head.to(torch.float32).refresh()
    with torch.inference_mode():
        other = copy.deepcopy(head)
    other.refresh()
    assert torch.equal(other.rounded_weight, head.rounded_weight)
    assert set(head.state_dict()) == {"weight"}
    head.forget()
    assert not list(head.buffers())


@torch.no_grad()
def logits(model, rows=1):
    """Those of the prompt's last token, and of one more."""
    ids = token_ids(rows, 7, vocab=LARGE_VOCABULARY["vocab_size"])
    first = model(ids[:, :-1], use_cache=True)
    return first.logits[:, -1], model(ids[:, -1:], past_key_values=first.past_key_values).logits[:, -1]


@torch.no_grad()
def test_a_compiled_step_reads_it(compile_only):
    compile_only(LastPart)
    plain = make(tie_word_embeddings=True)
    quick = copy.deepcopy(plain).prepare_for_inference(compile=True, head_bits=8)
    for _ in range(2):
        (first, step), (right_first, right_step) = logits(quick), logits(plain)
        quick.lm_head.forget()
        torch.testing.assert_close(first, right_first)
        assert_within_tolerance(step, right_step)
        for each in (plain, quick):
            each.lm_head._apply(torch.clone)  # its weight is in another place, and so will be the rounded one
            each.lm_head.weight.mul_(torch.linspace(-1, 2, 64))  # seen by the next step, as is its embedding
    files = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    assert {name: tensor.shape for name, tensor in quick.state_dict().items()} == files

    compile_only()
    quick.prepare_for_inference(compile=True)  # without it
    assert type(quick.lm_head) in (nn.Linear, QuickLinear)
    assert_close(logits(quick)[1], logits(plain)[1])
    quick.prepare_for_inference(compile=True, head_bits=8).prepare_for_training()
    assert not any(isinstance(module, EightBitHead) for module in quick.modules())
    assert torch.equal(logits(quick)[1], logits(plain)[1])


@pytest.fixture
def traced(monkeypatch):
    """Run the functions that would be compiled as they are traced."""

    def of(cls, module, *_):
        def run(*arguments):
            with own_trace():
                return module(*arguments)

        return run

    monkeypatch.setattr(compiled.CompiledFunction, "of", classmethod(of))


@pytest.mark.parametrize(("family", "cls"), [
    ("qwen3", blockformer.BlockformerDecoderForCausalLM),
    ("marian", blockformer.BlockformerEncoderDecoderForConditionalGeneration),
])  # fmt: skip
@pytest.mark.parametrize(("rows", "beams", "is_read"), [(1, 1, True), (4, 1, True), (5, 1, False), (1, 4, True)])
@torch.no_grad()
def test_which_batches_read_it(family, cls, rows, beams, is_read, traced, monkeypatch):
    is_decoder, calls = family == "qwen3", []
    model = make(family, cls=cls, **({} if is_decoder else {"decoder_start_token_id": 3}))
    model.prepare_for_inference(compile=True, head_bits=8)
    multiply = EightBitHead.forward

    def forward(self, states):
        found = multiply(self, states)
        calls.append(not torch.equal(found, nn.functional.linear(states, self.weight, self.bias)))
        return found

    monkeypatch.setattr(EightBitHead, "forward", forward)
    ids = token_ids(rows, 7, vocab=LARGE_VOCABULARY["vocab_size"])
    model.generate(ids, num_beams=beams, do_sample=False, min_new_tokens=3, max_new_tokens=3)
    # A decoder's first token is its prompt's. Beams of it are rows like any others.
    assert calls == [is_read and not is_decoder, is_read, is_read]


@pytest.mark.parametrize("is_tied", [True, False])
@torch.no_grad()
def test_a_model_that_is_prepared_already(is_tied, traced):
    plain = make(dtype=torch.bfloat16, tie_word_embeddings=is_tied)
    model = copy.deepcopy(plain).prepare_for_inference()
    model.prepare_for_inference(compile=True, head_bits=8)
    assert type(model.lm_head) is EightBitHead
    assert_within_tolerance(logits(model)[1].float(), logits(plain)[1].float())


def test_the_compiled_code_is_for_any_weights():
    digests = set()
    for factor in (1, 2):
        model = make().prepare_for_inference(compile=True, head_bits=8)
        model.lm_head.weight.mul_(factor)
        model.lm_head.refresh()
        digests.add(compiled._digest(LastPart(model, model.get_decoder()), {}, (), (), False))
    assert len(digests) == 1


def _hooked():
    model = make()
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


def _with_a_head_of_its_own():
    class Head(nn.Linear):
        pass

    model = make()
    model.lm_head.__class__ = Head
    return model


@pytest.mark.parametrize(("model", "settings", "message"), [
    (make, {"compile": True, "head_bits": 4}, "head_bits must be 8 or None, not 4"),
    (make, {"compile": True, "head_bits": True}, "head_bits must be 8 or None, not True"),
    (make, {"head_bits": 8}, "needs compile=True"),
    (lambda: make("bert", cls=blockformer.BlockformerEncoderForMaskedLM), {"compile": True, "head_bits": 8},
     "a model on the CPU that writes text"),
    (lambda: make(dtype=torch.float64), {"compile": True, "head_bits": 8}, "float64"),
    (_hooked, {"compile": True, "head_bits": 8}, "plain head"),
    (_with_a_head_of_its_own, {"compile": True, "head_bits": 8}, "plain head; this one is a Head"),
])  # fmt: skip
def test_what_it_is_not_for_is_refused(model, settings, message):
    model = model().train()
    with pytest.raises(ValueError, match=message):
        model.prepare_for_inference(**settings)
    assert model.training  # nothing was done
