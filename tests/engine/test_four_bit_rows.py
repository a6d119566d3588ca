"""The 4-bit product of few rows as a loop: what plain weights give, from a copy that follows the weights."""

import copy

import pytest
import torch
from pairs import assert_close
from quantized_layers import layer_of, low_of, pair

from blockformer.engine import origin
from blockformer.engine.four_bit_rows import ORDERED, OrderedWeights, TracedQuantizedLinear
from blockformer.engine.measure import own_trace
from blockformer.model.awq_linear import QuantizedLinear


def traced_of(*arguments, **settings):
    """A layer with its copy, and its plain twin in float32."""
    layer, plain = layer_of(*arguments, **settings)
    layer.__class__ = TracedQuantizedLinear
    layer.put_in_order()
    return layer, plain


def assert_near(found, expected, dtype):
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert (found - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "group"), [
    (384, 128), (384, 64), (384, 32), (384, 16), (384, 2), (384, 6), (384, 48), (384, -1), (512, 256),
])  # fmt: skip
@torch.no_grad()
def test_few_rows_are_those_of_plain_weights(inputs, group, dtype, bias):
    layer, plain = traced_of(48, inputs, group, bias)
    plain = plain.double()
    for rows in (1, 3):
        states = torch.randn(rows, 1, inputs).to(dtype)
        with own_trace():
            found = layer(states)
        assert_near(found, plain(states.double()), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "group"), [(384, 128), (384, 2), (384, 6), (384, -1)])
@torch.no_grad()
def test_many_rows_are_those_of_plain_weights(inputs, group, dtype):
    layer, plain = traced_of(48, inputs, group, bias=True)
    plain, layer = plain.double(), layer.to(dtype)
    states = torch.randn(2, 5, inputs).to(dtype)
    with own_trace():
        assert_near(layer(states), plain(states.double()), dtype)


@torch.no_grad()
def test_calls_outside_of_a_graph_do_not_read_the_copy():
    layer, plain = traced_of(48, 192, 32)
    layer.ordered_numbers.zero_()
    for states in (torch.randn(40, 192), torch.randn(1, 192)):
        assert_close(layer(states), plain(states))
    with own_trace():
        assert not torch.allclose(layer(states), plain(states))


@torch.no_grad()
def test_the_copies_follow_the_weights():
    model = pair()[0].prepare_for_inference(compile=True)
    layers = low_of(model)
    assert layers
    assert all(type(layer) is TracedQuantizedLinear for layer in layers)
    ordered = OrderedWeights(model)

    def numbers():
        ordered.refresh()
        return [layer.ordered_numbers.clone() for layer in layers]

    first, made = numbers(), origin.last_made()
    OrderedWeights(model).refresh()
    assert all(map(torch.equal, numbers(), first))
    assert origin.last_made() is made  # no copy where there is one
    held = [layer.ordered_numbers for layer in layers]
    other = copy.deepcopy(model)
    for layer in low_of(other):
        layer.qweight.random_(-(2**31), 2**31 - 1)
    model.load_state_dict(other.state_dict())
    second = numbers()
    assert not any(torch.equal(new, old) for new, old in zip(second, first, strict=True))
    layers[0].qweight = layers[0].qweight.flip(0)
    assert not torch.equal(numbers()[0], second[0])
    third = numbers()[0].clone()
    layers[0].qweight.zero_()
    assert not torch.equal(numbers()[0], third)
    assert numbers()[0].unique().tolist() == [0]
    layers[0].qweight.data = torch.full_like(layers[0].qweight, -1)
    assert numbers()[0].unique().tolist() == [255]
    assert all(layer.ordered_numbers is old for layer, old in zip(layers, held, strict=True))  # code has read these


def test_a_copied_layer_counts_its_writes_anew():
    layer, _ = traced_of(48, 192, 32)
    for _ in range(3):
        layer.scales.mul_(1)
    layer._origin = None
    layer.put_in_order()
    other = copy.deepcopy(layer)
    for _ in range(3):  # as often as those of the first one
        other.scales.mul_(2)
    other.put_in_order()
    torch.testing.assert_close(other.ordered_scales, 8 * layer.ordered_scales)
    with torch.inference_mode():
        third = copy.deepcopy(layer)
    third.put_in_order()
    assert torch.equal(third.ordered_scales, layer.ordered_scales)
    assert layer.to(torch.bfloat16).ordered_scales.dtype is torch.float32


def test_the_copy_is_in_no_state_dict_and_goes_with_the_preparation():
    model = pair()[0]
    names = set(model.state_dict())
    model.prepare_for_inference(compile=True)
    OrderedWeights(model).refresh()
    assert set(model.state_dict()) == names
    assert all(hasattr(layer, name) for layer in low_of(model) for name in ORDERED)
    model.prepare_for_training()
    assert {type(layer) for layer in low_of(model)} == {QuantizedLinear}
    assert not any(hasattr(layer, name) for layer in low_of(model) for name in ORDERED)
