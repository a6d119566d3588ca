"""Packed weights in models so small that packing would not pay."""

import torch

from blockformer.engine import choices, linear, packed
from blockformer.engine.packed import PackedLinear


def pack_whatever_can_be(monkeypatch):
    """Have every weight packed that this PyTorch has a layout for, whatever its size and the processor."""
    faster_here(monkeypatch, *((choices.PACKED, dtype) for dtype in packed._LEAST_WEIGHTS if can_pack(dtype)))
    monkeypatch.setattr(packed, "_LEAST_WEIGHTS", dict.fromkeys(packed._LEAST_WEIGHTS, 0))
    monkeypatch.setattr(packed, "_writes_one_text", lambda model: False)


def faster_here(monkeypatch, *ways):
    """Have these ways to multiply, and no others, be faster on this processor."""
    monkeypatch.setattr(choices, "FASTER_HERE", dict.fromkeys(ways, True))


def packed_of(model):
    """The layers of a model whose weights are packed at present."""
    return [module for module in model.modules() if isinstance(module, PackedLinear) and module.is_packed]


def packed_layer(layer):
    """A plain layer, its weight packed."""
    assert packed.pack(layer.weight)
    layer.__class__ = PackedLinear
    return layer


@torch.no_grad()
def can_pack(dtype) -> bool:
    """Whether this PyTorch has oneDNN's layout for the dtype, tried with a small matrix."""
    try:
        small = torch.ones(8, 8, dtype=dtype, device="cpu")
        linear.by_onednn(small, packed.in_layout(small))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True
