"""Layers that read the same states, fused into one product: queries, keys and values; gate and up projection.

For a single token, launch overhead rivals the matmul itself. A model that is prepared for inference therefore has the
weights of such layers side by side: the first layer that is called multiplies by all of them, and the others take
their parts of the result.

I inputs of every layer, O outputs of all together.
"""

import threading
from typing import Any

import torch
from torch import nn

from ..attention import Attention
from ..feed_forward import FeedForward
from .four_bits import JointlyPacked, PreparedQuantizedLinear
from .linear import is_bare, is_transformed
from .packed import HalfCopy, PackedLinear

# The sub-modules that read the same states, by the class of their parent.
_GROUPS = {Attention: ("q_proj", "k_proj", "v_proj"), FeedForward: ("gate_proj", "up_proj")}


_lock = threading.Lock()


class FusedProduct:
    """The weights of some layers side by side, for few tokens; the layers keep what goes into a state dict.

    Args:
        layers: packed layers or 4-bit layers, with the same inputs, either all with a bias or all without.
        dtype: of the model.
    """

    def __init__(self, layers: tuple[Any, ...], dtype):
        self.layers, self.dtype = layers, dtype
        self.sizes = [layer.out_features for layer in layers]
        self._starts = [sum(self.sizes[:index]) for index in range(len(layers))]
        self._reset()

    def _reset(self):
        self._copy: Any = None  # the weights side by side, made when first needed
        self._last = threading.local()  # what this thread multiplied last

    def build(self) -> bool:
        """Put the weights side by side, if not done yet; False if this PyTorch or device cannot."""
        with _lock:
            if self._copy is not None:
                return True
            if not isinstance(self.layers[0], PackedLinear):
                self._copy = JointlyPacked(self.layers) if JointlyPacked.is_there_for(self.layers, self.dtype) else None
            elif HalfCopy.is_there():
                self._copy = HalfCopy(torch.cat([layer.packed.dense() for layer in self.layers]))
        return self._copy is not None

    def part(self, layer, states):
        """One layer's product with its bias.

        Args:
            layer: one of the layers.
            states: [..., I].

        Returns:
            [..., outputs of the layer], or None if it has to multiply by itself: with many tokens, with gradients, or
            when the layers are called with different states.
        """
        index = self.layers.index(layer)
        if index == 0:
            self._last.states, self._last.product = states, self._multiply(states)
        elif getattr(self._last, "states", None) is not states:
            return None
        product = self._last.product
        if index == len(self.layers) - 1:
            self._last.states = None  # whoever calls with this tensor again may have changed it
        return None if product is None else product[..., self._starts[index] : self._starts[index] + self.sizes[index]]

    def whole(self, *parts):
        """The product [..., O] of which these are the parts, one per layer in order; None if they are not."""
        product = getattr(self._last, "product", None)
        if product is None:
            return None
        step = product.element_size()
        for part, start, size in zip(parts, self._starts, self.sizes, strict=True):
            is_part = part.data_ptr() == product.data_ptr() + start * step and part.stride() == product.stride()
            if not is_part or part.shape[-1] != size:
                return None
        return product

    def is_current(self) -> bool:
        """Whether the layers' weights are still those that were put side by side."""
        return self._copy is None or self._copy.is_current()

    def _multiply(self, states):
        """[..., I] -> [..., O], or None."""
        if is_transformed() or torch.is_autocast_enabled(states.device.type):
            return None
        if (torch.is_grad_enabled() and states.requires_grad) or (self._copy is None and not self.build()):
            return None
        if not self._copy.takes(states) or not self._copy.is_current():
            return None
        bias = None if self.layers[0].bias is None else torch.cat([layer.bias for layer in self.layers])
        return self._copy.product(states, bias)

    def __getstate__(self):
        # Copies and pickles hold only the layers, because the layout depends on the processor.
        return {name: value for name, value in vars(self).items() if name not in ("_copy", "_last")}

    def __setstate__(self, state):
        vars(self).update(state)
        self._reset()


def groups_of(model: nn.Module, has_copies: bool) -> list[tuple[Any, ...]]:
    """The groups of layers that can be fused and gain from it.

    Args:
        model: with packed layers and layers of 4 bits.
        has_copies: whether packed bfloat16 weights may be held twice. 4-bit layers have a packed copy either way.
    """
    groups = []
    for module in model.modules():
        names = next((names for kind, names in _GROUPS.items() if isinstance(module, kind)), ())
        layers = tuple(layer for layer in (module._modules.get(name) for name in names) if layer is not None)
        if len(layers) == len(names) > 0 and not getattr(module, "is_cross_attention", False):
            groups += [layers] if can_fuse(layers, has_copies, model.dtype) else []
    return groups


def can_fuse(layers, has_copies: bool, dtype) -> bool:
    """Whether these layers can be fused: they are of one kind and nothing wraps them."""
    kinds = {type(layer) for layer in layers}
    if len(kinds) != 1 or len({layer.bias is None for layer in layers}) != 1 or not all(map(is_bare, layers)):
        return False
    if kinds == {PackedLinear}:
        has_copies = has_copies and all(layer.packed.dtype is torch.bfloat16 for layer in layers)
        return has_copies and HalfCopy.is_there() and all(HalfCopy.holds(layer.packed.dense()) for layer in layers)
    return kinds == {PreparedQuantizedLinear} and JointlyPacked.is_there_for(layers, dtype)
