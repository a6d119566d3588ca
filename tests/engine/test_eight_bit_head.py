"""A head in 8 bits: compiled steps read it within the stated tolerance, and it follows the head's weight."""

import copy

import pytest
import torch
from pairs import assert_close, token_ids
from sizes import STRONG
from torch import nn
from written_scores import scores_of_two

import blockformer
from blockformer import preset
from blockformer.engine.few_rows import Rows
from blockformer.engine.low_bits import Following, RoundedHead

LARGE_VOCABULARY = {**STRONG, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 1003, "initializer_range": 0.3}

# On a busy machine the compiler may take minutes for one step.
pytestmark = pytest.mark.timeout(1200)


def make(family="qwen3", dtype=torch.float32, cls=blockformer.BlockformerDecoderForCausalLM, **settings):
    torch.manual_seed(0)
    return cls(preset(family, **LARGE_VOCABULARY, **settings)).to(dtype).eval()


def head_of(bias, dtype):
    """A head with its copy, which is refreshed, and what holds it."""
    torch.manual_seed(0)
    plain = nn.Linear(256, 5000, bias, dtype=dtype)
    nn.init.normal_(plain.weight)
    head = RoundedHead(plain)
    head.rows = Rows(1)
    held = Following([head], sampled=True)
    held.refresh()
    return head, plain, held


def assert_within_tolerance(found, right):
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    error, spread = (found - right).float(), right.float().std()
    assert 0.001 * spread < error.square().mean().sqrt() < 0.01 * spread  # rounded, and no more than it says
    assert error.abs().max() < 0.06 * spread


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_few_rows_are_within_the_tolerance(bias, dtype):
    head, plain, _ = head_of(bias, dtype)
    for shape in ((1, 1), (4, 1)):
        states = torch.randn(*shape, 256, dtype=dtype)
        head.rows = Rows(shape[0])
        assert_within_tolerance(head(states), plain(states))


@torch.no_grad()
def test_rows_of_zeros_and_of_what_is_not_finite():
    head, plain, held = head_of(False, torch.float32)
    plain.weight[0], plain.weight[1, 0], plain.weight[2, 3] = 0.0, torch.nan, torch.inf
    held.refresh()
    states = torch.ones(1, 256)
    found = head(states)[0]
    assert found[0] == 0.0
    assert not found[1:3].isfinite().any()
    assert_within_tolerance(found[3:], plain(states)[0, 3:])


@torch.no_grad()
def test_the_copy_follows_the_weight():
    head, plain, held = head_of(False, torch.float32)
    kept = head.rounded_weight
    held.refresh()
    assert head.rounded_weight is kept
    states = torch.randn(1, 1, 256)
    for change in (
        lambda layer: layer.weight.mul_(torch.linspace(1, 2, 256)),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.flip(0))),
        lambda layer: setattr(layer.weight, "data", layer.weight.flip(1)),
        lambda layer: layer.weight.data.mul_(-1.01),  # which PyTorch does not count
    ):
        change(plain)
        held.refresh()
        assert_within_tolerance(head(states), plain(states))


@torch.no_grad()
def logits(model, rows=1):
    """Those of the prompt's last token, and of one more."""
    return scores_of_two(model, token_ids(rows, 7, vocab=LARGE_VOCABULARY["vocab_size"]))


@torch.no_grad()
def test_a_compiled_step_reads_it():
    plain = make(tie_word_embeddings=True)
    quick = copy.deepcopy(plain).prepare_for_inference(compile=True, head_bits=8)
    for _ in range(2):
        (first, step), (right_first, right_step) = logits(quick), logits(plain)
        torch.testing.assert_close(first, right_first)
        assert_within_tolerance(step, right_step)
        for each in (plain, quick):
            each.lm_head._apply(torch.clone)  # its weight is in another place, and so will be the rounded one
            each.lm_head.weight.mul_(torch.linspace(-1, 2, 64))  # seen by the next step, as is its embedding
    files = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    assert {name: tensor.shape for name, tensor in quick.state_dict().items()} == files


@pytest.mark.usefixtures("untraced")
@torch.no_grad()
def test_it_goes_with_the_preparation():
    plain = make(tie_word_embeddings=True)
    quick = copy.deepcopy(plain).prepare_for_inference(compile=True, head_bits=8)
    quick.prepare_for_inference(compile=True)  # without it
    assert_close(logits(quick)[1], logits(plain)[1])
    quick.prepare_for_inference(compile=True, head_bits=8).prepare_for_training()
    assert type(quick.lm_head) is nn.Linear
    assert torch.equal(logits(quick)[1], logits(plain)[1])


@pytest.mark.parametrize(("family", "cls"), [
    ("qwen3", blockformer.BlockformerDecoderForCausalLM),
    ("marian", blockformer.BlockformerEncoderDecoderForConditionalGeneration),
])  # fmt: skip
@pytest.mark.parametrize(("rows", "beams", "is_read"), [(1, 1, True), (4, 1, True), (5, 1, False), (1, 4, True)])
@torch.no_grad()
def test_which_batches_read_it(family, cls, rows, beams, is_read, untraced, monkeypatch):
    is_decoder, calls = family == "qwen3", []
    model = make(family, cls=cls, **({} if is_decoder else {"decoder_start_token_id": 3}))
    model.prepare_for_inference(compile=True, head_bits=8)
    multiply = RoundedHead.forward
    monkeypatch.setattr(RoundedHead, "forward", lambda *given: calls.append(1) or multiply(*given))
    ids = token_ids(rows, 7, vocab=LARGE_VOCABULARY["vocab_size"])
    model.generate(ids, num_beams=beams, do_sample=False, min_new_tokens=3, max_new_tokens=3)
    # The prompt gives the first token, and the compiler has one more call. Beams of a decoder are rows like others.
    assert len(calls) == is_read * 3


@pytest.mark.parametrize("is_tied", [True, False])
@torch.no_grad()
def test_a_model_that_is_prepared_already(is_tied, untraced):
    plain = make(dtype=torch.bfloat16, tie_word_embeddings=is_tied)
    model = copy.deepcopy(plain).prepare_for_inference()
    model.prepare_for_inference(compile=True, head_bits=8)
    assert_within_tolerance(logits(model)[1].float(), logits(plain)[1].float())


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
