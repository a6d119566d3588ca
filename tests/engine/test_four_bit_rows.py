"""The 4-bit product of few rows as a loop: what plain weights give, from a copy that follows the weights."""

import copy

import pytest
import torch
from quantized_layers import layer_of, low_of, pair

from blockformer.engine.linear import OrderedLinear
from blockformer.model.awq_linear import QuantizedLinear


def ordered_of(*arguments, rows=None, **settings):
    """A layer's copy in a loop's order, and its plain twin in float32."""
    layer, plain = layer_of(*arguments, **settings)
    ordered = OrderedLinear(layer)
    ordered.refresh()
    ordered.rows = rows
    return ordered, plain


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
    ordered, plain = ordered_of(48, inputs, group, bias)
    plain = plain.double()
    for rows in (1, 3):
        ordered.rows = rows
        states = torch.randn(rows, 1, inputs).to(dtype)
        assert_near(ordered(states), plain(states.double()), dtype)


@torch.no_grad()
def test_the_copies_follow_the_weights():
    model = pair()[0].prepare_for_inference(compile=True)
    layers, steps = low_of(model), model.runtime.decoding.steps
    assert layers
    steps.refresh(model)
    assert list(steps._ordered) == layers
    copies = list(steps._ordered.values())

    def numbers():
        steps.refresh(model)
        return [each.ordered_numbers.clone() for each in copies]

    first = numbers()
    held = [each.ordered_numbers for each in copies]
    steps.refresh(model)
    assert all(each.ordered_numbers is kept for each, kept in zip(copies, held, strict=True))  # none is made
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


def test_the_copy_is_none_of_the_model_s():
    model = pair()[0]
    names = set(model.state_dict())
    model.prepare_for_inference(compile=True)
    steps = model.runtime.decoding.steps
    steps.refresh(model)
    assert set(model.state_dict()) == names
    assert not any("ordered" in name for name, _ in model.named_buffers())
    assert steps.bytes_of_copies() > 0
    assert not copy.deepcopy(model).runtime.decoding.steps._ordered
    model.prepare_for_training()
    assert {type(layer) for layer in low_of(model)} == {QuantizedLinear}
