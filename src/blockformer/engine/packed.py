"""Bfloat16 and float32 weights in the layout that oneDNN multiplies fastest, for inference only.

A packed weight is the same parameter as before: optimizers, ties, adapters and state dicts find it where they left it.
A weight that is also an embedding stays plain: each look-up would have to unpack rows of it.

I inputs and O outputs of a linear layer.
"""

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..model.latent_attention import LatentAttention
from ..model.stack import Stack
from ..watched import is_plain_linear, is_transformed
from .choices import PACKED, is_enabled, is_exported, is_faster
from .linear import by_onednn, is_dense

# Weights below which a call of oneDNN takes longer than the product (benchmarks/thresholds.py), in float32 for one row.
_LEAST_WEIGHTS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 17}
# The number of rows that a layout of oneDNN's is for. In float32 the one for a single row is slower than this one, with
# any number.
_ROWS = {torch.bfloat16: 1, torch.float32: 16}
_REFUSED = "a packed weight cannot be written to: call prepare_for_training() first, which makes it plain."
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GIVES_ARRAY: set = {torch.Tensor.numpy, torch.Tensor.__array__}


def in_layout(weight):
    """A matrix [O, I], bfloat16 or float32, in oneDNN's own layout; `to_dense` gives it back bit for bit."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS[weight.dtype])


class PackedWeight(torch.Tensor):
    """A parameter [O, I] whose numbers are in oneDNN's own layout; there is no plain copy.

    To all others it is that matrix. An operator that reads it gets plain numbers for as long as it runs; a view of it
    holds a plain copy of its numbers. Whatever would write to either is refused. The address of its memory is 0, as of
    all tensors that have none.

    Args:
        numbers: in oneDNN's layout; a view's numbers are plain.
        like: a tensor of its shape, dtype and device.

    Raises:
        RuntimeError: something would write to it.
    """

    numbers: torch.Tensor
    _original: torch.Tensor  # without its numbers; see `pack`

    @staticmethod
    def __new__(cls, numbers, like=None, requires_grad=False):
        if like is None:  # accelerate makes a weight's like from its class
            return nn.Parameter(numbers, requires_grad=requires_grad)
        # To PyTorch it is of another device, so that no plain tensor is given its memory, which is not there.
        kind = {"strides": like.stride(), "dtype": like.dtype, "device": "meta", "dispatch_device": True}
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, **kind)

    def __init__(self, numbers, like=None, requires_grad=False):
        self.numbers = numbers

    def plain(self):
        """The plain matrix [O, I], bit for bit."""
        # Whoever gets it may want gradients, and neither a mode of the caller's nor torch.func knows oneDNN's layout.
        with torch.inference_mode(False), _disable_current_modes(), torch._C._DisableFuncTorch():
            return self.numbers.to_dense() if self.numbers.is_mkldnn else self.numbers

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == _SET_DATA and type(args[0]) is cls:
            if getattr(args[1], "numbers", None) is args[0].numbers:
                return None  # a cast or a move that changes nothing
            raise RuntimeError(_REFUSED)
        if func in _GIVES_ARRAY:  # of a copy, which nobody is to take for the weight
            array = func(args[0].plain().clone(), *args[1:], **(kwargs or {}))
            array.setflags(write=False)
            return array
        if func is torch.Tensor.tolist:
            return args[0].plain().tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0])
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        aliases = {argument.name: argument.alias_info for argument in func._schema.arguments}
        arguments = {**dict(zip(aliases, args, strict=False)), **(kwargs or {})}
        own = [name for name, value in arguments.items() if any(isinstance(each, cls) for each in tree_leaves(value))]
        if any(aliases[name] is not None and aliases[name].is_write for name in own):
            raise RuntimeError(_REFUSED)
        args, kwargs = tree_map(lambda value: value.plain() if isinstance(value, cls) else value, (args, kwargs or {}))
        output = func(*args, **kwargs)
        if not any(aliases[name] for name in own):
            return output
        return tree_map(lambda value: cls(value, value) if isinstance(value, torch.Tensor) else value, output)

    def __repr__(self, *, tensor_contents=None):
        return f"packed {self.plain()!r}"

    def __deepcopy__(self, memo):
        memo[id(self)] = copied = _repacked(self.plain(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol):
        # The layout belongs to the processor.
        return _repacked, (self.plain(), self.requires_grad)


def _repacked(weight, requires_grad: bool) -> nn.Parameter:
    parameter = nn.Parameter(weight, requires_grad=requires_grad)
    pack(parameter)
    return parameter


def _for_another_process(weight: PackedWeight) -> tuple:
    """As `__reduce_ex__`, with bytes in place of shared memory, which would end with the plain matrix."""
    return _of_bytes, (weight.plain().view(torch.uint8).numpy(), weight.dtype, weight.requires_grad)


def _of_bytes(array, dtype, requires_grad: bool) -> nn.Parameter:
    return _repacked(torch.tensor(array).view(dtype), requires_grad)


ForkingPickler.register(PackedWeight, _for_another_process)


def pack(parameter: nn.Parameter) -> bool:
    """Pack a parameter [O, I] in place, unless something knows it by more than its name; return whether it is packed.

    A weak reference to it, or a graph that is to take its gradient, would see another tensor.
    """
    packed = PackedWeight(in_layout(parameter), parameter).requires_grad_(parameter.requires_grad)
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
    """Undo `pack`: the parameter is plain again; so is one that somebody has made of a packed one."""
    weight, original = parameter.plain(), getattr(parameter, "_original", None)
    if original is None:
        torch.utils.swap_tensors(parameter, nn.Parameter(weight.clone(), parameter.requires_grad))
        return
    with torch.inference_mode(original.is_inference()):
        original.data = weight.clone() if original.is_inference() else weight
    original.requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        original.grad = parameter.grad
    del parameter._original  # which would hold itself when they have changed places
    try:
        torch.utils.swap_tensors(parameter, original)
    except RuntimeError as error:
        parameter._original = original
        raise RuntimeError("a weak reference or a graph still uses prepared weights: release it first.") from error


class PackedLinear(nn.Linear):
    """`nn.Linear` of a packed weight. A plain layer becomes one by changing its class.

    Shapes: [..., I] -> [..., O].
    """

    weight: Any  # a `PackedWeight`, unless somebody has replaced it

    def forward(self, states):
        if torch.compiler.is_dynamo_compiling() or is_exported():
            raise RuntimeError("packed weights cannot be traced: call prepare_for_training() first.")
        weight = self.weight
        if type(weight) is not PackedWeight or (torch.is_grad_enabled() and weight.requires_grad):
            return super().forward(states)
        if is_transformed() or not is_enabled() or (torch.is_grad_enabled() and states.requires_grad):
            return F.linear(states, weight.plain(), self.bias)
        if torch.is_autocast_enabled("cpu"):
            return self._product(states.to(weight.dtype), weight.numbers).to(torch.get_autocast_dtype("cpu"))
        return self._product(states, weight.numbers)

    @property
    def is_packed(self) -> bool:
        """Whether its weight is still the packed one."""
        return type(self.weight) is PackedWeight

    def _product(self, states, numbers):
        try:
            return by_onednn(states, numbers, self.bias)
        except RuntimeError:  # of states that do not fit: PyTorch's own words say why
            return F.linear(states, self.weight.plain(), self.bias)

    def state_dict(self, *args, **kwargs):
        """As in PyTorch, with plain numbers, also of a packed weight that has another name or module by now."""
        state = super().state_dict(*args, **kwargs)
        packed = {name: each for name, each in state.items() if type(each) is PackedWeight}
        state.update({name: each.plain() for name, each in packed.items()})
        return state

    def _apply(self, fn, recurse=True):
        # What changes nothing leaves the weight packed.
        empty = torch.empty(0, dtype=self.weight.dtype, device="cpu")
        if type(self.weight) is PackedWeight and (fn(empty) is not empty or empty.is_shared()):
            unpack(self.weight)
        return super()._apply(fn, recurse)


def pack_weights(model) -> None:
    """Pack the weights of the plain linear layers on the CPU, one after the other.

    Layers with a wrapper or a hook stay as they are; so do those whose weight is an embedding's, too, or of a dtype
    that gains nothing by packing on this processor. In float32 a decoder gains nothing: it writes one text at a time,
    and a single row is multiplied as fast by a plain weight. One thread multiplies a single row more slowly by a packed
    one, so with one thread an encoder-decoder stays plain, too.
    """
    _let_go(model)
    if not is_enabled() or not gains(model):
        return
    latent = [module for module in model.modules() if isinstance(module, LatentAttention)]
    plain = {layer for part in latent for layer in (part.k_proj, part.v_proj)}  # read as matrices
    dtype = model.dtype
    for owners in owners_of_weights(model):
        weight = owners[0].weight
        # T5 in float16 has layers in float32, whose dtype the model looks up.
        if not are_packable(owners) or weight.dtype is not dtype or weight.numel() < _LEAST_WEIGHTS[dtype]:
            continue
        if plain.isdisjoint(owners) and pack(weight):
            for layer in owners:
                layer.__class__ = PackedLinear


def unpack_weights(model: nn.Module) -> None:
    """Make packed layers plain again."""
    # Pruning or a parametrization may have moved a weight elsewhere.
    for parameter in list(model.parameters()):
        if type(parameter) is PackedWeight:
            unpack(parameter)
    _let_go(model)


def _let_go(model: nn.Module) -> None:
    """Make layers plain whose weight is not packed."""
    layers: list[Any] = [module for module in model.modules() if type(module) is PackedLinear]
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
    return is_faster(PACKED, model.dtype) and not (model.dtype is torch.float32 and _writes_one_text(model))


def _writes_one_text(model) -> bool:
    """Whether one row at a time counts most: in a decoder that writes, and with one thread in an encoder-decoder."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    is_one = not model.config.is_encoder_decoder or torch.get_num_threads() == 1
    return is_one and any(stack.is_causal for stack in stacks)


def are_packable(modules) -> bool:
    """Whether the modules of one weight are all plain linear layers, on the CPU and dense."""
    weight = modules[0].weight
    return all(map(is_plain_linear, modules)) and weight.device.type == "cpu" and is_dense(weight)
