"""Layers that read the same states, as one product: queries, keys and values; the gate and what it is multiplied by.

To begin a product costs a step of one token as much time as a good part of the work itself, and so do the norms and
rotations of its results. A model that is prepared for inference therefore has such layers' weights side by side.

I inputs of every layer, O outputs of all together.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from .awq_linear import JointlyPacked, QuantizedLinear
from .inference import HalfCopy, PackedLinear, is_worth, pack_weights, packed_weights, unpack_weights
from .kernels import fast_paths_enabled, is_bare, is_transformed


class Joint:
    """The weights of some layers side by side, for few tokens; the layers keep what a state dict holds.

    Args:
        layers: packed ones or ones of 4 bits, with the same inputs, all with a bias or none.
    """

    def __init__(self, layers: tuple[Any, ...]):
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        is_packed = isinstance(layers[0], PackedLinear)
        weights = [layer.packed.dense() for layer in layers] if is_packed else None
        self._copy = HalfCopy(torch.cat(weights)) if weights else JointlyPacked(layers)

    def product(self, states, layers):
        """The products of all layers, one after the other.

        Args:
            states: [..., I].
            layers: those that are to be multiplied by now.

        Returns:
            [..., O], or None where each layer has to be called: for many tokens, to learn, or because there are other
            layers now, or a wrapper or hook that wants to be asked.
        """
        if not fast_paths_enabled() or is_transformed() or torch.is_autocast_enabled(states.device.type):
            return None
        if (torch.is_grad_enabled() and states.requires_grad) or not self._copy.takes(states):
            return None
        if not self.is_of(layers) or not all(map(is_bare, layers)):
            return None
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return self._copy.product(states, bias)

    def is_of(self, layers) -> bool:
        """Whether these are the layers, with the weights that they had."""
        return layers == self.layers and self._copy.is_current()

    @classmethod
    def of(cls, layers: tuple[Any, ...]) -> "Joint | None":
        """The joint, or None where such weights cannot be made: on another device, without FBGEMM."""
        is_packed = isinstance(layers[0], PackedLinear)
        return cls(layers) if (HalfCopy.is_there() if is_packed else JointlyPacked.is_there_for(layers)) else None

    def __reduce__(self):
        # Copied and pickled as the layers: the layout belongs to the processor.
        return Joint.of, (self.layers,)


def arrange_weights(model: nn.Module, second_copy: bool) -> None:
    """Lay the weights out for answering: packed, and those of `joinable()` layers side by side.

    Args:
        model: of modules that have a `joint` where they have layers that may be one.
        second_copy: whether packed bfloat16 weights may be held twice. Of 4 bits there is a packed copy either way.
    """
    pack_weights(model)
    packed = packed_weights(model)
    if not fast_paths_enabled():
        return
    has_copies = bool(second_copy and packed and is_worth("copy"))
    drop_stale_joints(model)
    joined = [module for module in _places(model) if module.joint or _are_joinable(module.joinable(), has_copies)]
    single = packed - {layer.packed for module in joined for layer in module.joinable() if type(layer) is PackedLinear}

    def join(module):
        module.joint = module.joint or Joint(module.joinable())
        for layer in module.joint.layers:
            if isinstance(layer, PackedLinear):
                layer.packed.copy = None

    def copy(weight):
        weight.copy = weight.copy or HalfCopy.of(weight.dense())

    # One thread makes 30 million weights in a second; more than two would hold much at a time.
    with ThreadPoolExecutor(2 if has_copies else 1) as pool:
        list(pool.map(join, joined))
        list(pool.map(copy, single if has_copies else ()))


def _are_joinable(layers, has_copies: bool) -> bool:
    """Whether a `Joint` of these layers, perhaps none, is of use: of one kind, with nothing around them."""
    kinds = {type(layer) for layer in layers}
    if len(kinds) != 1 or len({layer.bias is None for layer in layers}) != 1 or not all(map(is_bare, layers)):
        return False
    if kinds == {PackedLinear}:
        return has_copies and all(HalfCopy.holds(layer.packed.dense()) for layer in layers)
    return kinds == {QuantizedLinear} and JointlyPacked.is_there_for(layers)


def drop_stale_joints(model: nn.Module) -> None:
    """Forget those whose layers, or whose layers' weights, are others now."""
    for module in _places(model):
        if module.joint is not None and not module.joint.is_of(module.joinable()):
            module.joint = None


def separate_weights(model: nn.Module) -> None:
    """Undo `arrange_weights`: plain weights, each layer for itself."""
    for module in _places(model):
        module.joint = None
    unpack_weights(model)


def _places(model) -> list:
    return [module for module in model.modules() if hasattr(module, "joinable")]
