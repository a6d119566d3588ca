"""Bfloat16 and float32 weights in the layout that oneDNN multiplies fastest, for inference only.

A weight that is also an embedding stays plain: each look-up would have to unpack rows of it.

I inputs and O outputs of a linear layer.
"""

import math
import weakref

import torch
from torch import nn
from torch.nn import functional as F

from . import onednn
from .linear import is_plain_linear, is_transformed
from .measure import MANY_ROWS, is_enabled, is_exported
from .packing_gains import is_quicker_packed_for, rows_of_layers

# Weights below which a call of oneDNN takes longer than the product.
_LEAST_WEIGHTS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 16}


class PackedWeight:
    """A matrix [O, I] in oneDNN's own layout; there is no plain copy."""

    def __init__(self, weight):
        self.dtype, self.held = weight.dtype, onednn.packed(weight)
        self._dense: weakref.ref | None = None

    def product(self, states, bias):
        """[..., I] -> [..., O]."""
        if torch.compiler.is_dynamo_compiling() or is_exported():
            raise RuntimeError("packed weights cannot be traced: call prepare_for_training() before.")
        if is_transformed() or (torch.is_grad_enabled() and states.requires_grad):
            return F.linear(states, self.dense(), bias)
        if torch.is_autocast_enabled("cpu"):
            return self._product(states.to(self.dtype), bias).to(torch.get_autocast_dtype("cpu"))
        return self._product(states, bias)

    def activated(self, states, bias, activation: onednn.Activation):
        """The product and its activation as one operator, or None where they are two: see `product`."""
        if torch.compiler.is_dynamo_compiling() or is_exported() or is_transformed():
            return None
        if (torch.is_grad_enabled() and states.requires_grad) or torch.is_autocast_enabled("cpu"):
            return None
        try:
            return onednn.product(states, self.held, bias, activation)
        except RuntimeError:  # `product` says why
            return None

    def _product(self, states, bias):
        try:
            return onednn.product(states, self.held, bias)
        except RuntimeError:  # of states that do not fit: PyTorch's own words say why
            return F.linear(states, self.dense(), bias)

    def dense(self):
        """The plain matrix, bit for bit: the same tensor for every caller as long as one of them holds it."""
        weight = None if self._dense is None else self._dense()
        if weight is None:
            with torch.inference_mode(False):  # whoever gets it may want gradients
                weight = self.held.to_dense()
            self._dense = weakref.ref(weight)
        return weight

    def __reduce__(self):
        # Copied and pickled as the plain matrix: the layout belongs to the processor.
        return type(self), (self.dense(),)


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` while its weight is packed. No gradients; a state dict holds the plain weight.

    The parameter is kept without its numbers and has them again afterwards: an optimizer goes on with it.

    Shapes: [..., I] -> [..., O].
    """

    def __init__(self, layer, packed: PackedWeight):
        super().__init__()
        self.packed, self.bias = packed, layer.bias
        self._plain = [layer, layer.weight]  # in a list, so that they are neither submodule nor parameter
        layer.weight = None
        self.train(layer.training)

    @property
    def in_features(self) -> int:
        """I."""
        return self._plain[0].in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self._plain[0].out_features

    def forward(self, states):
        if (given := self.given()) is not None:
            return F.linear(states, given, self.bias)
        return self.packed.product(states, self.bias)

    def let_go(self) -> None:
        """Free the plain numbers."""
        _, weight = self._plain
        with torch.inference_mode(weight.is_inference()):
            weight.data = torch.empty(0, dtype=weight.dtype, device="cpu")

    def unpack(self) -> nn.Linear:
        """The layer, with its weight again."""
        layer, weight = self._plain
        if weight.shape != (dense := self.packed.dense()).shape:
            with torch.inference_mode(weight.is_inference()):
                weight.data = dense
        layer.weight = weight
        return layer.train(self.training)

    def given(self):
        """The weight that `torch.func.functional_call` has put here for a call, or None."""
        return self.__dict__.get("weight", self._parameters.get("weight"))

    def __getattr__(self, name):
        if name == "weight":
            raise AttributeError("the weight is packed for inference: call prepare_for_training() before using it.")
        return super().__getattr__(name)

    def extra_repr(self):
        return self._plain[0].extra_repr()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.packed.dense()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs):
        error_msgs.append(f"{prefix}weight is prepared for inference: call prepare_for_training() before loading.")


def pack_weights(model: nn.Module) -> int:
    """Pack the weights of the plain linear layers on the CPU, one after the other; returns how many.

    Layers with a wrapper or a hook stay as they are; so do those whose weight is an embedding's, too, or of a dtype
    that gains nothing by packing on this processor.
    """
    places = [owners for owners in owners_of_weights(model) if are_packable([module for _, _, module in owners])]
    # T5 in float16 has layers in float32, whose dtype the model looks up.
    places = [owners for owners in places if owners[0][2].weight.dtype is model.dtype]
    rows = rows_of_layers(model)
    places = [owners for owners in places if gains(owners[0][2].weight, rows.get(owners[0][2], MANY_ROWS))]
    for owners in places:
        packed = PackedWeight(owners[0][2].weight)
        stand_ins = {layer: PackedLinear(layer, packed) for layer in {layer for _, _, layer in owners}}
        for stand_in in stand_ins.values():
            stand_in.let_go()
        for parent, name, layer in owners:
            setattr(parent, name, stand_ins[layer])
    return len(places)


def packed_weights(model: nn.Module) -> set[PackedWeight]:
    """The weights of all packed layers, each once."""
    return {module.packed for module in model.modules() if isinstance(module, PackedLinear)}


def check_stays(model: nn.Module, fn) -> None:
    """Refuse to cast or move a model with packed weights, before anything is changed.

    Args:
        fn: what `nn.Module._apply` will do to each tensor.

    Raises:
        RuntimeError: `fn` changes the dtype or the device.
    """
    for dtype in {weight.dtype for weight in packed_weights(model)}:
        changed = fn(torch.empty(0, dtype=dtype, device="cpu"))
        if changed.dtype is not dtype or changed.device.type != "cpu":
            raise RuntimeError(
                f"the model is prepared for inference in {str(dtype).removeprefix('torch.')} on the CPU: call "
                "prepare_for_training() before it is moved or cast."
            )


def unpack_weights(model: nn.Module) -> None:
    """Put the plain modules back."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.unpack())


def owners_of_weights(model: nn.Module) -> list:
    """The modules of each weight, each module with its parent and its name there."""
    owners: dict[int, list] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(getattr(child, "weight", None), nn.Parameter):
                owners.setdefault(id(child.weight), []).append((parent, name, child))
    return list(owners.values())


def gains(weight, rows: int = MANY_ROWS) -> bool:
    """Whether a weight [O, I] is multiplied faster when it is packed.

    Args:
        rows: see `rows_of_layers`.
    """
    if not is_enabled() or weight.numel() < _LEAST_WEIGHTS.get(weight.dtype, math.inf):
        return False
    if not onednn.is_quicker_packed(weight.dtype):
        return False
    return weight.dtype is not torch.float32 or is_quicker_packed_for(rows, *weight.shape)


def are_packable(modules) -> bool:
    """Whether the modules of one weight are all plain linear layers, on the CPU and dense."""
    weight = modules[0].weight
    is_dense = weight.layout is torch.strided and weight.is_contiguous()
    return is_dense and weight.device.type == "cpu" and all(map(is_plain_linear, modules))
