"""The product of few rows in parts: the right one, asked about where it may gain."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from blockformer.engine import linear, measure, onednn


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    monkeypatch.setattr(measure, "_verdicts", {})


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
    for rows in (1, 3):
        assert not linear.is_quicker_in_parts(rows, 1 << 22)
    assert not onednn.is_quicker_in_float32()


def test_few_rows_are_asked_about_once_whatever_the_size():
    for rows, weights in ((1, 1 << 18), (1, 1 << 22), (2, 1 << 18), (4, 1 << 22), (5, 1 << 22), (1, 1 << 8)):
        linear.is_quicker_in_parts(rows, weights)
    assert measure.verdicts().keys() == {"in parts, rows: 1", "in parts, rows: 4"}


@pytest.mark.parametrize("quicker", [{"in parts"}, {"onednn"}, {"in parts", "onednn"}, set()])
@torch.no_grad()
def test_each_number_of_rows_has_its_product(quicker, monkeypatch):
    """Few rows in parts, and many by oneDNN's: where that is faster."""
    asked = []

    def answered(question, measure):
        asked.append(question)
        return question.partition(",")[0] in quicker

    for module in (linear, onednn):
        monkeypatch.setattr(module, "is_measured", answered)
    layer, small = nn.Linear(256, 1024), nn.Linear(64, 64)
    for each in (layer, small):
        each.__class__ = linear.QuickLinear
    few = linear.in_parts if "in parts" in quicker else None
    for rows in (1, 4):
        assert layer._product(torch.ones(rows, 256)) is few
    assert layer._product(torch.ones(100, 256)) is (onednn.product if "onednn" in quicker else None)
    assert layer._product(torch.ones(5, 256)) is None  # too little work
    asked.clear()
    monkeypatch.setattr(linear, "can_multiply", lambda *_: pytest.fail("asked about a small product"))
    assert torch.equal(small(torch.ones(1, 64)), F.linear(torch.ones(1, 64), small.weight, small.bias))
    assert not asked
