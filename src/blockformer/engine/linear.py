"""Faster products with plain weights: oneDNN's float32 and, for many rows, half precision by way of float32.

I inputs and O outputs of a linear layer.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from .few_rows import are_few
from .measure import is_enabled, is_measured, is_own_trace, is_quicker, random_matrix

# Multiplications below which oneDNN's overhead, tens of microseconds a call, costs more than its product gains.
_LEAST_WORK = 1 << 23
# Fewer rows than this are a matter of reading the weights; from this size of theirs on, that outweighs the overhead.
_FEW_ROWS, _LEAST_WEIGHTS, _LEAST_WEIGHTS_IN_GRAPHS = 8, 1 << 19, 1 << 18
HALVES = (torch.float16, torch.bfloat16)
# Their rows from which converting the weights to float32 pays off, and how many of the weights' elements at a time.
_MANY_ROWS, _WIDENED = 8, 1 << 24


class QuickLinear(nn.Linear):
    """`nn.Linear` on the CPU by the faster product. A plain layer becomes one by changing its class.

    On some processors PyTorch's float32 product reaches about half of the speed of oneDNN's. Both sum in float32, in
    a different order. Many rows of half precision are multiplied in float32 where the processor has no product for it.

    Shapes: [..., I] -> [..., O].
    """

    def forward(self, states):
        # A token of a small model takes no longer than asking: this is asked first, and nothing else.
        if not is_own_trace() and states.numel() < self.__dict__.get("_least_states", 0):
            return F.linear(states, self.weight, self.bias)
        product = self._product(states)
        return super().forward(states) if product is None else product(states, self.weight, self.bias)

    def adopt(self) -> None:
        """Note how many elements of states there must be for the faster product to be any other than the plain one."""
        self._least_states = self.in_features * _least_rows(self.weight)

    def _product(self, states) -> Callable | None:
        if is_own_trace():
            return None if are_few(states) else self._traced_product()
        weight, rows = self.weight, states.numel() // self.in_features
        is_float = weight.dtype is torch.float32
        if rows < _least_rows(weight) or (is_float and rows >= _FEW_ROWS and rows * weight.numel() < _LEAST_WORK):
            return None
        if weight.dtype not in (torch.float32, *HALVES) or states.dtype is not weight.dtype:
            return None
        if (
            states.device.type != "cpu"
            or not is_enabled()
            or not (_is_dense(states) and _is_dense(weight))
            or is_transformed()
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        learns = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
        if weight.dtype in HALVES:
            return _widened if not learns and is_quicker_widened(weight.dtype) else None
        is_quicker = onednn_is_quicker() if learns or rows >= _FEW_ROWS else onednn_is_quicker_for_one_row()
        return (_Product.apply if learns else _onednn) if is_quicker else None

    def _traced_product(self) -> Callable | None:
        """The product for a graph of the engine's own, where the number of rows may vary; that of few is a loop."""
        if self.weight.dtype is not torch.float32 or self.weight.numel() < _LEAST_WEIGHTS_IN_GRAPHS:
            return None
        return _onednn if onednn_is_quicker() else None


def _least_rows(weight) -> int:
    """Rows from which another product than PyTorch's own may be faster."""
    if weight.dtype in HALVES:
        return _MANY_ROWS
    return 1 if weight.numel() >= _LEAST_WEIGHTS else math.ceil(_LEAST_WORK / max(1, weight.numel()))


def can_be_quick(layer: nn.Module) -> bool:
    """Whether a layer is a plain `nn.Linear` on the CPU, of a dtype with a faster product there."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
        return False
    if layer.weight.dtype is torch.float32:
        return onednn_is_quicker() or onednn_is_quicker_for_one_row()
    return layer.weight.dtype in HALVES and is_quicker_widened(layer.weight.dtype)


def _is_dense(tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and tensor.numel() > 0 and (type(tensor) is torch.Tensor or tensor.is_contiguous())


def is_transformed() -> bool:
    """Whether forward-mode differentiation or torch.func is active: they know only plain operations."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_plain_linear(module) -> bool:
    """Whether calling the module would be `F.linear` with its weights and nothing else: no wrapper, no hook."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and is_bare(module)


def is_bare(module) -> bool:
    """Whether calling the module is calling its class's `forward` and nothing else: no wrapper, no hook."""
    own = module.__dict__  # a compiled step asks this of all modules: an attribute takes longer to look up
    hooked = "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]
    return not (hooked or own["_backward_hooks"] or own["_backward_pre_hooks"])


def _onednn(states, weight, bias=None):
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """y = x W^T + b with all three products of forward and backward by oneDNN."""

    @staticmethod
    def forward(ctx, states, weight, bias):
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        return _onednn(states, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        states, weight = ctx.saved_tensors
        # For second derivatives the products must be differentiable themselves.
        product = F.linear if torch.is_grad_enabled() else _onednn
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), states.reshape(-1, states.shape[-1])
        grad_states = product(grad, weight.t(), None) if needs_states else None
        grad_weight = product(rows.t(), inputs.t(), None) if needs_weight else None
        return grad_states, grad_weight, rows.sum(0) if ctx.has_bias and needs_bias else None


def _widened(states, weight, bias):
    """The product of half precision in float32, a few of the outputs at a time."""
    dtype, states, size = states.dtype, states.float(), max(1, _WIDENED // weight.shape[1])
    parts = zip(weight.split(size), [None] * len(weight) if bias is None else bias.split(size), strict=False)
    product = float32_product()
    outputs = [product(states, part.float(), each if each is None else each.float()).to(dtype) for part, each in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def float32_product() -> Callable:
    """The faster float32 product of many rows."""
    return _onednn if onednn_is_quicker() else F.linear


def is_quicker_widened(dtype) -> bool:
    """Whether this processor multiplies many rows of a half precision faster in float32."""
    return is_measured(f"widened, {dtype}", functools.partial(_measure_widened, dtype))


def onednn_is_quicker() -> bool:
    """Whether oneDNN's float32 product exists, is correct, and is faster than PyTorch's own."""
    return is_measured("onednn", lambda: _measure_onednn(64))


def onednn_is_quicker_for_one_row() -> bool:
    """The same for a product that reads the weights for one row."""
    return is_measured("onednn, one row", lambda: _measure_onednn(1))


@torch.no_grad()
def _measure_onednn(rows: int) -> bool:
    """This takes about a tenth of a second."""
    states, weight = random_matrix(rows, 1024), random_matrix(3072, 1024)
    try:
        fast, plain = _onednn(states, weight, None), F.linear(states, weight)
        if not torch.allclose(fast, plain, rtol=1e-4, atol=1e-3):
            return False
        return is_quicker(lambda: _onednn(states, weight, None), lambda: F.linear(states, weight), 12, share=0.8)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


@torch.no_grad()
def _measure_widened(dtype) -> bool:
    states, weight = random_matrix(64, 1024).to(dtype), random_matrix(1024, 1024).to(dtype)
    return is_quicker(lambda: _widened(states, weight, None), lambda: F.linear(states, weight), rounds=4)
