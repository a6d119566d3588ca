"""Packed weights in models so small that packing would not pay."""

from blockformer.engine import measure, onednn, packed
from blockformer.engine.packed import PackedLinear


def pack_whatever_can_be(monkeypatch):
    """Have every weight packed that this PyTorch has a layout for, whatever its size and whatever is measured here."""
    verdicts = {f"packed, {dtype}": onednn.can_pack(dtype) for dtype in packed._LEAST_WEIGHTS}
    monkeypatch.setattr(measure, "_verdicts", {**measure._verdicts, **verdicts})
    monkeypatch.setattr(packed, "_LEAST_WEIGHTS", dict.fromkeys(packed._LEAST_WEIGHTS, 0))
    monkeypatch.setattr(packed, "_writes_one_text", lambda model: False)


def packed_of(model):
    """The layers of a model whose weights are packed at present."""
    return [module for module in model.modules() if isinstance(module, PackedLinear) and module.is_packed]


def packed_layer(layer):
    """A plain layer, its weight packed."""
    assert packed.pack(layer.weight)
    layer.__class__ = PackedLinear
    return layer
