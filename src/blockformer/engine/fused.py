"""Layers that read the same states, fused into one product: queries, keys and values; gate and up projection.

For a single token, the overhead of a call rivals the product itself. A model that is prepared for inference therefore
has the weights of such layers side by side: the first layer that is called multiplies by all of them, and the others
take their parts of the result.

I inputs of every layer, O outputs of all together.
"""

import threading
from typing import Any

import torch
from torch import nn

from ..attention import Attention
from ..feed_forward import FeedForward
from .four_bits import JointlyPacked, PreparedQuantizedLinear
from .linear import is_bare, is_plain_linear, is_transformed
from .measure import MANY_ROWS
from .packed import PackedLinear, PackedRows, PackedWeight, are_packable, gains, owners_of_weights
from .packing_gains import rows_of_layers

# The sub-modules that read the same states, by the class of their parent.
_GROUPS = {Attention: ("q_proj", "k_proj", "v_proj"), FeedForward: ("gate_proj", "up_proj")}


class FusedProduct:
    """One product of packed layers that share a weight. Every layer knows it as `fused`.

    Args:
        layers: their rows follow each other in the weight; either all have a bias or none has.
    """

    def __init__(self, layers: tuple[Any, ...]):
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self._starts = [sum(self.sizes[:index]) for index in range(len(layers))]
        self._reset()

    def _reset(self):
        self._last = threading.local()  # what this thread multiplied last

    def part(self, layer, states):
        """One layer's product with its bias.

        Args:
            layer: one of the layers.
            states: [..., I].

        Returns:
            [..., outputs of the layer], or None if it has to multiply by itself: the layers are called with different
            states or, of 4 bits, with many tokens or with gradients.
        """
        last, layers = self._last, self.layers
        if layer is layers[0]:
            product = self._multiply(states)
            parts = None if product is None else torch.split_with_sizes(product, self.sizes, -1)
            last.states, last.parts = states, parts
        elif getattr(last, "states", None) is not states:
            return None
        parts = last.parts
        if layer is layers[-1]:
            last.states = last.parts = None  # whoever calls with this tensor again may have changed it
        return None if parts is None else parts[layers.index(layer)]

    def whole(self, *parts):
        """The product [..., O] of which these are the parts, one per layer in order; None if they are not.

        It is not differentiable.
        """
        first = parts[0]
        if is_transformed() or (torch.is_grad_enabled() and first.requires_grad):
            return None
        step = first.element_size()
        for part, start, size in zip(parts, self._starts, self.sizes, strict=True):
            is_part = part.data_ptr() == first.data_ptr() + start * step and part.stride() == first.stride()
            if not is_part or part.shape[-1] != size:
                return None
        shape = (*first.shape[:-1], sum(self.sizes))
        return first.as_strided(shape, first.stride()) if first.stride()[-2] == shape[-1] else None

    def _multiply(self, states):
        """[..., I] -> [..., O], or None."""
        return self.layers[0].packed.whole.product(states, self._bias())

    def _bias(self):
        return None if self.layers[0].bias is None else torch.cat([layer.bias for layer in self.layers])

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_last"}

    def __setstate__(self, state):
        vars(self).update(state)
        self._reset()


_lock = threading.Lock()


class FusedFourBits(FusedProduct):
    """The same of 4-bit layers, for few tokens; the layers keep their integers, which go into a state dict.

    Args:
        layers: 4-bit layers with the same inputs, either all with a bias or all without.
        dtype: of the model.
    """

    def __init__(self, layers: tuple[PreparedQuantizedLinear, ...], dtype):
        super().__init__(layers)
        self.dtype = dtype

    def _reset(self):
        super()._reset()
        self._copy: JointlyPacked | None = None  # the weights side by side, made when first needed

    def build(self) -> bool:
        """Put the weights side by side, if not done yet; False if this PyTorch or device cannot."""
        with _lock:
            if self._copy is None and JointlyPacked.is_there_for(self.layers, self.dtype):
                self._copy = JointlyPacked(self.layers)
        return self._copy is not None

    def is_current(self) -> bool:
        """Whether the layers' weights are still those that were put side by side."""
        return self._copy is None or self._copy.is_current()

    def _multiply(self, states):
        if is_transformed() or torch.is_autocast_enabled(states.device.type):
            return None
        if (torch.is_grad_enabled() and states.requires_grad) or (self._copy is None and not self.build()):
            return None
        if not self._copy.takes(states) or not self._copy.is_current():
            return None
        return self._copy.product(states, self._bias())

    def __getstate__(self):
        # Copies and pickles hold only the layers, because the layout depends on the processor.
        return {name: value for name, value in super().__getstate__().items() if name != "_copy"}


def pack_together(model: nn.Module, second_copy: bool = False) -> None:
    """Pack the weights of plain linear layers on the CPU that read the same states, those of a group as one.

    Layers with a wrapper or a hook stay as they are; so do those whose weight others have too.
    """
    owners = {id(places[0][2].weight): places for places in owners_of_weights(model)}
    rows = rows_of_layers(model)
    for parent, names in groups_of(model):
        layers = tuple(parent._modules[name] for name in names)
        # Layers of a subclass are called with other states, too.
        are_alone = type(parent) in _GROUPS and all(map(is_plain_linear, layers))
        if not are_alone or any(len(owners[id(layer.weight)]) > 1 or not are_packable([layer]) for layer in layers):
            continue
        are_alike = {x.weight.dtype for x in layers} == {model.dtype} and len({x.bias is None for x in layers}) == 1
        weights = [layer.weight for layer in layers]
        if are_alike and gains(weights, second_copy, rows=rows.get(layers[0], MANY_ROWS)):
            _pack_group(parent, names, layers)


def _pack_group(parent, names, layers) -> None:
    whole = PackedWeight(torch.cat([layer.weight.detach() for layer in layers]))
    start, packed = 0, list[PackedLinear]()
    for layer in layers:
        packed.append(PackedLinear(layer, PackedRows(whole, slice(start, start + layer.out_features))))
        start += layer.out_features
    fused = FusedProduct(tuple(packed))
    for name, layer in zip(names, packed, strict=True):
        layer.let_go()
        layer.fused = fused
        setattr(parent, name, layer)


def groups_of(model: nn.Module) -> list:
    """The modules that have layers which read the same states, each with the names of these layers."""
    found = []
    for module in model.modules():
        names = next((names for kind, names in _GROUPS.items() if isinstance(module, kind)), ())
        if names and all(module._modules.get(name) is not None for name in names):
            found += [] if getattr(module, "is_cross_attention", False) else [(module, names)]
    return found


def fuse_four_bits(model: nn.Module) -> None:
    """Fuse the 4-bit layers of a model that can be and gain from it, unless they are, with their current weights."""
    for parent, names in groups_of(model):
        layers = tuple(parent._modules[name] for name in names)
        if can_fuse(layers, model.dtype) and not _is_fused(layers):
            product = FusedFourBits(layers, model.dtype)
            product.build()
            for layer in layers:
                layer.fused = product


def _is_fused(layers) -> bool:
    product = layers[0].fused
    are_together = product is not None and product.layers == layers and all(each.fused is product for each in layers)
    return are_together and product.is_current()


def can_fuse(layers, dtype) -> bool:
    """Whether these layers are of 4 bits and can be fused: they are alike and nothing wraps them."""
    if {type(layer) for layer in layers} != {PreparedQuantizedLinear} or not all(map(is_bare, layers)):
        return False
    return len({layer.bias is None for layer in layers}) == 1 and JointlyPacked.is_there_for(layers, dtype)
