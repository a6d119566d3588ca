"""Fast paths give what the plain ways give, over shapes, strides, dtypes and masks."""

import copy

import pytest
import torch
from packed_layers import faster_here
from pairs import assert_close, assert_gradients_close, model, token_ids
from torch import nn
from transformers import AttentionInterface

import blockformer
from blockformer.engine import attention as quick_attention
from blockformer.engine import choices
from blockformer.engine import linear as quick_linear
from blockformer.engine.linear import QuickLinear
from blockformer.model import attention


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_text_is_the_same_without_fast_paths(family, monkeypatch):
    ours, ids = model(family), token_ids(3, 20)
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    fast = ours.generate(ids, **arguments)
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    assert torch.equal(ours.generate(ids, **arguments), fast)


@pytest.fixture
def quicker(monkeypatch):
    """oneDNN judged the quicker one, whatever this machine says of it."""
    try:
        torch.ops.mkldnn._linear_pointwise(torch.ones(2, 3), torch.ones(4, 3), None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        pytest.skip("this PyTorch has no oneDNN linear")
    faster_here(monkeypatch, (choices.ONEDNN, torch.float32))
    take_small_ones(monkeypatch)


def take_small_ones(monkeypatch):
    """Have products be asked about however small they are."""
    monkeypatch.setattr(quick_linear, "_LEAST", 0)
    monkeypatch.setattr(quick_linear, "_LEAST_WORK", 0)


def linear(layer, states):
    """The product of a layer of the same weights in a prepared model."""
    kind = layer.__class__
    layer.__class__ = QuickLinear if kind is nn.Linear else kind
    try:
        return layer(states)
    finally:
        layer.__class__ = kind


def is_onednn(product):
    return type(product.grad_fn).__name__ == "_ProductBackward"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (1, 1, 7), (3, 5, 7), (2, 1, 7)])
@pytest.mark.parametrize("strided", [True, False])
def test_linear_and_its_gradients(quicker, shape, bias, strided):
    layer = nn.Linear(7, 11, bias=bias)
    states = torch.randn(*shape[:-1], 14)[..., ::2] if strided else torch.randn(*shape)
    states.requires_grad_()
    outputs = [linear(layer, states), layer(states)]
    assert is_onednn(outputs[0])
    assert_close(*outputs)
    gradients = [torch.autograd.grad(y.square().sum(), [states, *layer.parameters()]) for y in outputs]
    for one, other in zip(*gradients, strict=True):
        assert one.shape == other.shape
        assert_close(one, other)
    with torch.no_grad():
        assert_close(linear(layer, states), layer(states))


def test_it_is_off_without_fast_paths(quicker, monkeypatch):
    layer, states = nn.Linear(7, 11), torch.randn(3, 7)
    assert is_onednn(linear(layer, states))
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    assert not is_onednn(linear(layer, states))


def test_gradient_of_the_gradient(quicker):
    layer, states = nn.Linear(5, 4), torch.randn(3, 5, requires_grad=True)

    def penalty(apply):
        (gradient,) = torch.autograd.grad(apply(states).tanh().sum(), states, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [states, layer.weight])

    for one, other in zip(penalty(lambda x: linear(layer, x)), penalty(layer), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("frozen", ["states", "weight"])
def test_only_what_is_needed_is_computed(quicker, frozen):
    layer, states = nn.Linear(5, 4), torch.randn(3, 5, requires_grad=frozen != "states")
    layer.weight.requires_grad_(frozen != "weight")
    linear(layer, states).sum().backward()
    assert (states.grad is None) == (frozen == "states")
    assert (layer.weight.grad is None) == (frozen == "weight")


@torch.no_grad()
def test_other_models_keep_the_attention_of_the_library():
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8)
    library = AttentionInterface()["sdpa"]
    assert library is not quick_attention.sdpa_attention
    assert attention.ALL_ATTENTION_FUNCTIONS["sdpa"] is quick_attention.sdpa_attention
    assert attention.ALL_ATTENTION_FUNCTIONS["flex_attention"] is AttentionInterface()["flex_attention"]
    ours = model("qwen3").model.layers[0].self_attn
    outputs = [
        attend(ours, query, key, key, None, scaling=0.3)[0] for attend in (quick_attention.sdpa_attention, library)
    ]
    assert_close(*outputs)


@pytest.mark.parametrize(
    ("dtype", "device", "rows"),
    [("bfloat16", "cpu", 2), ("float64", "cpu", 2), ("float32", "meta", 2), ("float32", "cpu", 0)],
)
def test_products_that_stay_pytorchs_own(quicker, dtype, device, rows):
    layer = nn.Linear(4, 3, dtype=getattr(torch, dtype), device=device)
    states = torch.randn(rows, 4, device=device).to(layer.weight.dtype)
    output = linear(layer, states)
    assert output.shape == (rows, 3)
    assert not is_onednn(output)
    if device != "meta":
        assert torch.equal(output, layer(states))


@torch.no_grad()
def test_which_layers_a_prepared_model_multiplies_so(quicker):
    ours = model("qwen3")
    hooked, replaced, other = list(ours.model.layers[0].mlp.children())[:3]
    handle = hooked.register_forward_hook(lambda module, inputs, output: output)
    replaced.forward = replaced.forward
    ours.prepare_for_inference()
    kinds = {type(module) for module in ours.modules() if isinstance(module, nn.Linear)}
    assert kinds == {nn.Linear, QuickLinear}
    assert type(hooked) is type(replaced) is nn.Linear
    assert type(other) is type(ours.lm_head) is QuickLinear
    handle.remove()
    ours.prepare_for_training()
    assert type(hooked) is QuickLinear
    assert type(ours.lm_head) is nn.Linear


def test_a_training_step_is_that_of_the_plain_model(quicker):
    ours, ids = model("qwen3").train(), token_ids(2, 20)
    plain = copy.deepcopy(ours)
    blockformer.prepare_for_training(ours)
    for each in (ours, plain):
        each(ids, labels=ids).loss.backward()
    assert type(ours.model.layers[0].self_attn.q_proj) is QuickLinear
    gradients = [{name: each.grad for name, each in part.named_parameters()} for part in (ours, plain)]
    assert_gradients_close(*gradients)


def test_models_of_other_code_are_refused():
    with pytest.raises(TypeError, match="not a Blockformer model"):
        blockformer.prepare_for_inference(nn.Linear(2, 2))
    other = type("BlockformerDecoderModel", (nn.Module,), {"config": model("qwen3").config})()
    with pytest.raises(TypeError, match="import blockformer before you load"):
        blockformer.prepare_for_training(other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "is_widened"), [((8, 7), True), ((2, 2, 4, 7), True), ((7, 7), False), ((7,), False)]
)
@torch.no_grad()
def test_many_rows_of_half_precision(monkeypatch, dtype, bias, shape, is_widened):
    widened, used, way = quick_linear._widened, [], (choices.WIDENED, dtype)
    monkeypatch.setattr(quick_linear, "_widened", lambda *args: used.append(args) or widened(*args))
    faster_here(monkeypatch, way)
    take_small_ones(monkeypatch)
    monkeypatch.setattr(quick_linear, "_WIDENED", 4 * 7)  # parts of 4, 4 and 3 outputs
    layer, states = nn.Linear(7, 11, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    exact = nn.functional.linear(states.double(), layer.weight.double(), layer.bias.double() if bias else None)
    found = linear(layer, states)
    assert found.dtype is dtype
    assert bool(used) == is_widened
    torch.testing.assert_close(found, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=2**-12)
    used.clear()
    with torch.enable_grad():
        assert linear(layer, states).requires_grad
    faster_here(monkeypatch)
    linear(layer, states)
    faster_here(monkeypatch, way)
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    linear(layer, states)
    assert not used


def test_transforms_see_the_plain_layer(quicker):
    layer, states = nn.Linear(4, 3), torch.randn(5, 4)
    per_row = torch.func.vmap(torch.func.grad(lambda row: linear(layer, row).square().sum()))(states)
    expected = torch.func.vmap(torch.func.grad(lambda row: layer(row).square().sum()))(states)
    assert_close(per_row, expected)
    _, tangent = torch.func.jvp(lambda x: linear(layer, x), (states,), (torch.ones_like(states),))
    assert_close(tangent, torch.ones_like(states) @ layer.weight.t())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(layer, states).dtype == torch.bfloat16


def test_the_switch_comes_before_private_interfaces(monkeypatch):
    """BLOCKFORMER_FAST=0 is the way out when one of them is gone."""

    def gone():
        raise AttributeError("no such thing in this PyTorch")

    monkeypatch.setattr(quick_linear, "is_transformed", gone)
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    layer, states = nn.Linear(64, 32), torch.randn(2, 64)
    assert torch.equal(linear(layer, states), layer(states))
    assert quick_linear.PreparedQuantizedLinear(64, 32, False, 64)(states).shape == (2, 32)
