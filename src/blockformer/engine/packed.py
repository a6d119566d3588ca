"""Bfloat16 and float32 weights in the layout that oneDNN multiplies fastest, for inference only.

A packed weight is the same parameter as before: optimizers, ties, adapters and state dicts find it where they left it.
A weight that is also an embedding stays plain: each look-up would have to unpack rows of it.

I inputs and O outputs of a linear layer.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ..model.stack import Stack
from . import onednn
from .latent import layers_read_as_weights
from .linear import is_plain_linear, is_transformed
from .measure import is_enabled, is_exported

# Weights below which a call of oneDNN takes longer than the product.
_LEAST_WEIGHTS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 16}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# What gives others a tensor's memory.
_GIVES_MEMORY = {
    getattr(torch.Tensor, name) for name in ("numpy", "__array__", "tolist", "data_ptr", "untyped_storage")
}


class _Numbers:
    """The numbers of a weight, which all that share it hold: packed, or plain again."""

    def __init__(self, packed, plain=None):
        self.packed, self._plain = packed, plain
        self._borrowed: weakref.ref | None = None

    def plain(self):
        """The plain matrix [O, I], bit for bit: the same tensor for every caller as long as one of them holds it."""
        borrowed, packed = self._borrowed, self.packed
        weight = None if borrowed is None else borrowed()
        if packed is None or weight is not None:  # another thread may be setting them
            return self._plain if weight is None else weight
        with torch.inference_mode(False):  # whoever gets it may want gradients
            weight = packed.to_dense()
        self._borrowed = weakref.ref(weight)
        return weight

    def set(self, weight):
        """Hold plain numbers from now on; returns them."""
        self._plain, self.packed, self._borrowed = weight, None, None
        return weight


class PackedWeight(torch.Tensor):
    """A parameter [O, I] whose numbers are in oneDNN's own layout; there is no plain copy.

    To all others it is that matrix. An operator that reads it gets plain numbers for as long as it runs. One that
    writes to it, or takes a view by which somebody could, makes its numbers plain, which they stay: its layer is
    slower then, until it is packed again.

    Args:
        numbers: of the weight.
        like: a tensor of its shape, dtype and device.
    """

    numbers: _Numbers
    _original: torch.Tensor  # without its numbers; see `pack`

    @staticmethod
    def __new__(cls, numbers, like):
        # To PyTorch it is of another device, so that no plain tensor is given its memory, which is not there.
        kind = {"strides": like.stride(), "dtype": like.dtype, "device": "meta", "dispatch_device": True}
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, **kind)

    def __init__(self, numbers, like):
        self.numbers = numbers

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == _SET_DATA and type(args[0]) is cls:
            own, other = args
            if (own.shape, own.dtype) != (other.shape, other.dtype):
                raise RuntimeError(
                    "a packed weight's shape and dtype cannot change: call prepare_for_training() first."
                )
            own.numbers = other.numbers if type(other) is cls else _Numbers(None, other.detach())
            return None
        if func in _GIVES_MEMORY and type(args[0]) is cls:
            numbers = args[0].numbers
            return func(numbers.set(numbers.plain()), *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0])
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        aliases = {argument.name: argument.alias_info for argument in func._schema.arguments}

        def plain(value, is_aliased):
            if not isinstance(value, cls):
                return value
            matrix = value.numbers.plain()
            if is_aliased and value.numbers.packed is not None:
                value.numbers.set(matrix)
            return matrix

        given = {**dict(zip(aliases, args, strict=False)), **(kwargs or {})}
        found = {name: tree_map(partial(plain, is_aliased=bool(aliases[name])), each) for name, each in given.items()}
        output = func(*[found.pop(name) for name in list(aliases)[: len(args)]], **found)
        written = [name for name, alias in aliases.items() if alias is not None and alias.is_write and name in given]
        return given[written[0]] if len(written) == 1 and isinstance(given[written[0]], cls) else output

    def __repr__(self, *, tensor_contents=None):
        return f"packed {self.numbers.plain()!r}"

    def __deepcopy__(self, memo):
        memo[id(self)] = copied = _repacked(self.numbers.plain(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol):
        # The layout belongs to the processor.
        return _repacked, (self.numbers.plain(), self.requires_grad)


def _repacked(weight, requires_grad: bool) -> nn.Parameter:
    parameter = nn.Parameter(weight, requires_grad=requires_grad)
    pack(parameter)
    return parameter


def pack(parameter: nn.Parameter) -> bool:
    """Pack a parameter [O, I] in place, unless something knows it by more than its name; return whether it is packed.

    A weak reference to it, or a graph that is to take its gradient, would see another tensor.
    """
    packed = PackedWeight(_Numbers(onednn.packed(parameter)), parameter).requires_grad_(parameter.requires_grad)
    packed._is_param = True  # by which PyTorch knows a parameter of another class
    try:
        torch.utils.swap_tensors(parameter, packed)
    except RuntimeError:
        return False
    original, parameter._original = packed, packed  # type: ignore[attr-defined]  # they have changed places
    with torch.inference_mode(original.is_inference()):
        original.data = torch.empty(0, dtype=original.dtype, device="cpu")
    return True


def unpack(parameter: PackedWeight) -> None:
    """Undo `pack`: the parameter is plain again, with its present numbers."""
    weight = parameter.numbers.plain()
    original = getattr(parameter, "_original", None)
    if original is None:  # it was made of a packed weight's data
        original = nn.Parameter(weight.new_empty(0))
    with torch.inference_mode(original.is_inference()):
        original.data = weight.clone() if original.is_inference() else weight
    original.requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        original.grad = parameter.grad
    vars(parameter).pop("_original", None)  # which would hold itself when they have changed places
    try:
        torch.utils.swap_tensors(parameter, original)
    except RuntimeError as error:
        parameter._original = original
        raise RuntimeError("a weak reference or a graph holds packed weights: delete it first.") from error


class PackedLinear(nn.Linear):
    """`nn.Linear` of a packed weight. A plain layer becomes one by changing its class.

    Shapes: [..., I] -> [..., O].
    """

    weight: Any  # a `PackedWeight`, unless somebody has replaced it

    def forward(self, states):
        held = self._packed()
        if held is None or (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(states)
        if is_transformed() or (torch.is_grad_enabled() and states.requires_grad):
            return F.linear(states, self.weight.numbers.plain(), self.bias)
        if torch.is_autocast_enabled("cpu"):
            return self._product(states.to(self.weight.dtype), held).to(torch.get_autocast_dtype("cpu"))
        return self._product(states, held)

    @property
    def is_packed(self) -> bool:
        """Whether the numbers of the weight are packed at present: see `PackedWeight`."""
        return type(self.weight) is PackedWeight and self.weight.numbers.packed is not None

    def _packed(self):
        """The packed matrix; None if the weight is plain again, or another one for a call (`functional_call`)."""
        if torch.compiler.is_dynamo_compiling() or is_exported():
            raise RuntimeError("packed weights cannot be traced: call prepare_for_training() first.")
        weight = self.weight
        return weight.numbers.packed if type(weight) is PackedWeight else None

    def _product(self, states, held):
        try:
            return onednn.product(states, held, self.bias)
        except RuntimeError:  # of states that do not fit: PyTorch's own words say why
            return F.linear(states, self.weight.numbers.plain(), self.bias)

    def state_dict(self, *args, **kwargs):
        """As in PyTorch, with plain numbers, also of a packed weight that has another name or module by now."""
        found = super().state_dict(*args, **kwargs)
        packed = {name: each for name, each in found.items() if type(each) is PackedWeight}
        found.update({name: each.numbers.plain() for name, each in packed.items()})
        return found

    def _apply(self, fn, recurse=True):
        # What changes nothing leaves the weight packed.
        empty = torch.empty(0, dtype=self.weight.dtype, device="cpu")
        if type(self.weight) is PackedWeight and (fn(empty) is not empty or empty.is_shared()):
            unpack(self.weight)
        return super()._apply(fn, recurse)


def pack_weights(model) -> int:
    """Pack the weights of the plain linear layers on the CPU, one after the other; returns how many.

    Layers with a wrapper or a hook stay as they are; so do those whose weight is an embedding's, too, or of a dtype
    that gains nothing by packing on this processor. In float32 a decoder gains nothing: it writes one text at a time,
    and a single row is multiplied as fast by a plain weight.
    """
    unpack_weights(model, opened=True)
    if not is_enabled() or not gains(model):
        return 0
    places = [owners for owners in owners_of_weights(model) if are_packable(owners)]
    # T5 in float16 has layers in float32, whose dtype the model looks up.
    places = [owners for owners in places if owners[0].weight.dtype is model.dtype]
    plain = layers_read_as_weights(model)
    places = [owners for owners in places if not plain.intersection(owners)]
    places = [owners for owners in places if owners[0].weight.numel() >= _LEAST_WEIGHTS[model.dtype]]
    packed = [owners for owners in places if pack(owners[0].weight)]
    for layer in (layer for owners in packed for layer in owners):
        layer.__class__ = PackedLinear
    return len(packed)


def unpack_weights(model: nn.Module, opened: bool = False) -> None:
    """Make packed layers plain again.

    Args:
        opened: only those whose numbers are plain since somebody has written to them.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is PackedLinear]
    kept = {id(layer.weight) for layer in layers if opened and layer.is_packed}
    # Pruning or a parametrization may have moved one elsewhere.
    for parameter in list(model.parameters()):
        if type(parameter) is PackedWeight and id(parameter) not in kept:
            unpack(parameter)
    for layer in layers:
        if not layer.is_packed:
            layer.__class__ = nn.Linear


def owners_of_weights(model: nn.Module) -> list[list[Any]]:
    """The modules of each weight."""
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")  # an adapter's `weight` is the weight of the layer below it
        if weight is not None:
            owners.setdefault(id(weight), []).append(module)
    return list(owners.values())


def gains(model) -> bool:
    """Whether a model's large matrices are multiplied faster when they are packed."""
    if model.dtype not in _LEAST_WEIGHTS or (model.dtype is torch.float32 and _writes_one_text(model)):
        return False
    return onednn.is_quicker_packed(model.dtype)


def _writes_one_text(model) -> bool:
    """Whether a model is a decoder that writes, so that most of its products have one row."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    return not model.config.is_encoder_decoder and any(stack.is_causal for stack in stacks)


def are_packable(modules) -> bool:
    """Whether the modules of one weight are all plain linear layers, on the CPU and dense."""
    weight = modules[0].weight
    is_dense = weight.layout is torch.strided and type(weight) is nn.Parameter and weight.is_contiguous()
    return is_dense and weight.device.type == "cpu" and all(map(is_plain_linear, modules))
