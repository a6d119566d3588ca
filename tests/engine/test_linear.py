"""The product of few rows in parts: the right one, asked about where it may gain."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from blockformer.engine import linear, measure, onednn


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    monkeypatch.setattr(measure, "_verdicts", {})


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 1024), (2048, 96), (1000, 3000), (1 << 18, 64)])
def test_weights_to_be_timed_tell_where_an_output_stands(rows, outputs, inputs):
    weights = measure.some_weights(outputs, inputs)
    states = measure.random_matrix(rows, inputs)
    assert len(weights[0]) == outputs or (len(weights[0]) % 16 == 0 and len(weights[0]) >= 1024)
    assert sum(weight.numel() for weight in weights) <= max(1 << 23, 1024 * inputs)
    right = F.linear(states, weights[0])
    for shift in (1, 16, 64, len(weights[0]) // 16):
        assert not torch.allclose(right.roll(shift, -1), right, atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [7, 160, 163])  # fewer than parts, whole parts, and some more
@pytest.mark.parametrize("shape", [(1, 24), (2, 1, 24), (4, 24), (24,)])
def test_the_product_is_the_plain_one(shape, outputs, bias):
    layer, states = nn.Linear(24, outputs, bias=bias), torch.randn(shape)
    found = linear.in_parts(states, layer.weight, layer.bias)
    torch.testing.assert_close(found, layer(states), atol=1e-5, rtol=1e-5)
    found.view(-1)


def test_a_wrong_product_is_never_quicker(monkeypatch):
    for module, name in ((linear, "in_parts"), (onednn, "product")):
        monkeypatch.setattr(module, name, lambda states, weight: F.linear(states, weight).roll(64, -1))
    assert not linear.is_quicker_in_parts(1, 1024, 512)
    assert not linear.is_quicker_in_parts(3, 1024, 512)
    assert not onednn.is_quicker_in_float32()


@pytest.mark.parametrize("are_quicker", [{"parts"}, {"onednn"}, {"parts", "onednn"}, set()])
@torch.no_grad()
def test_few_rows_are_multiplied_in_parts_and_many_by_onednn(are_quicker, monkeypatch):
    asked = []
    verdict = lambda rows, outputs, inputs: asked.append((rows, outputs, inputs)) or "parts" in are_quicker  # noqa: E731
    monkeypatch.setattr(linear, "is_quicker_in_parts", verdict)
    monkeypatch.setattr(onednn, "is_quicker_in_float32", lambda: "onednn" in are_quicker)
    layer, small = nn.Linear(256, 1024), nn.Linear(64, 64)
    for each in (layer, small):
        each.__class__ = linear.QuickLinear
    for rows in (1, 4):
        assert layer._product(torch.ones(rows, 256)) is (linear.in_parts if "parts" in are_quicker else None)
    assert asked == [(1, 1024, 256), (4, 1024, 256)]
    assert layer._product(torch.ones(100, 256)) is (onednn.product if "onednn" in are_quicker else None)
    assert layer._product(torch.ones(5, 256)) is None  # too little work
    asked.clear()
    monkeypatch.setattr(linear, "can_multiply", lambda *_: pytest.fail("asked about a small product"))
    assert torch.equal(small(torch.ones(1, 64)), F.linear(torch.ones(1, 64), small.weight, small.bias))
    assert not asked
