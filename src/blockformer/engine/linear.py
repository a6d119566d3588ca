"""Faster products with plain weights: oneDNN's float32, few rows in parts, many of half precision by way of float32.

I inputs and O outputs of a linear layer.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from . import onednn
from .few_rows import MOST_ROWS
from .measure import is_enabled, is_measured, is_quicker, random_matrix
from .watched import is_transformed

# Into how many parts a weight is cut, by hand, and how many numbers it has at least: putting less together takes longer
# than it gains (benchmarks/thresholds.py).
_PARTS, _LEAST_IN_PARTS = 16, 1 << 17
# Multiplications below which no other product gains; and below which oneDNN's overhead, tens of microseconds a call,
# costs more than it gains (benchmarks/thresholds.py).
_LEAST, _LEAST_WORK = _LEAST_IN_PARTS, 1 << 23
HALVES = (torch.float16, torch.bfloat16)
# Their rows from which converting the weights to float32 pays off (benchmarks/thresholds.py), and how many elements of
# the weights at a time, by hand: 64 MiB.
_MANY_ROWS, _WIDENED = 8, 1 << 24


class QuickLinear(nn.Linear):
    """`nn.Linear` on the CPU by the faster product. A plain layer becomes one by changing its class.

    On some processors PyTorch's float32 product reaches about half of the speed of oneDNN's. Both sum in float32, in
    a different order. Many rows of half precision are multiplied in float32 where the processor has no product for it.

    Shapes: [..., I] -> [..., O].
    """

    def forward(self, states):
        # A token of a small model takes no longer than these questions, so they come first, and no others.
        if states.numel() * self.out_features < _LEAST:
            return F.linear(states, self.weight, self.bias)
        return (self._product(states) or F.linear)(states, self.weight, self.bias)

    def _product(self, states) -> Callable | None:
        """Another product than PyTorch's own, if that is faster for these states."""
        weight, rows = self.weight, states.numel() // self.in_features
        if weight.dtype not in (torch.float32, *HALVES) or not can_multiply(states, weight):
            return None
        if states.shape[-1:] != (self.in_features,):
            return None  # the error is PyTorch's own
        learned = (states, weight) if self.bias is None else (states, weight, self.bias)
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in learned)
        if weight.dtype in HALVES:
            return _widened if rows >= _MANY_ROWS and not learns and is_quicker_widened(weight.dtype) else None
        if rows <= MOST_ROWS and not learns:
            return in_parts if is_quicker_in_parts(rows, weight.numel()) else None
        is_quicker = rows * weight.numel() >= _LEAST_WORK and onednn.is_quicker_in_float32()
        return (_Product.apply if learns else onednn.product) if is_quicker else None


def in_parts(states, weight, bias=None):
    """`F.linear` of float32 states [..., I] that are few rows, weight [O, I], as a batch of products of its parts.

    MKL reads a weight for one row, or for a few, with one thread, and the weights of a batch with all of them.
    """
    size = len(weight) // _PARTS
    if size == 0:
        return F.linear(states, weight, bias)
    whole = _PARTS * size
    is_whole = whole == len(weight)
    parts = (weight if is_whole else weight[:whole]).view(_PARTS, size, -1)
    rows = states.reshape(-1, states.shape[-1])
    columns = rows.t().expand(_PARTS, -1, -1)  # [parts, I, R]: another order of the strides is much slower
    if bias is None:
        outputs = torch.bmm(parts, columns)
    else:
        outputs = torch.baddbmm((bias if is_whole else bias[:whole]).view(_PARTS, size, 1), parts, columns)
    if is_whole and len(rows) == 1:
        return outputs.view(*states.shape[:-1], whole)
    outputs = outputs.view(whole, -1).t().contiguous()  # attention is slower by others, and some code wants to view it
    if not is_whole:
        rest = F.linear(rows, weight[whole:], None if bias is None else bias[whole:])
        outputs = torch.cat([outputs, rest], 1)
    return outputs.reshape(*states.shape[:-1], len(weight))


def is_quicker_in_parts(rows: int, weights: int) -> bool:
    """Whether `in_parts` of so many rows and weights is faster here than PyTorch's own product."""
    if not 0 < rows <= MOST_ROWS or weights < _LEAST_IN_PARTS:
        return False
    rows = 1 if rows == 1 else MOST_ROWS
    return is_measured(f"in parts, rows: {rows}", functools.partial(_measure_parts, rows))


@torch.no_grad()
def _measure_parts(rows: int) -> bool:
    """This takes up to a tenth of a second, with weights that stay in no cache."""
    states, weight = random_matrix(rows, 1024), random_matrix(1024, 1024)
    weights = [weight, *(weight.clone() for _ in range(7))]
    if not torch.allclose(in_parts(states, weight), F.linear(states, weight), atol=1e-3, rtol=1e-4):
        return False
    work, other = (lambda by=by: [by(states, each) for each in weights] for by in (in_parts, F.linear))
    return is_quicker(work, other, rounds=8, share=0.95)


def can_be_quick(layer: nn.Module) -> bool:
    """Whether a layer is a plain `nn.Linear` on the CPU for which another product than PyTorch's may be faster."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or layer.weight.dim() != 2:
        return False
    if layer.weight.dtype is torch.float32:
        size = layer.weight.numel()
        return onednn.is_quicker_in_float32() or any(is_quicker_in_parts(rows, size) for rows in (1, MOST_ROWS))
    return layer.weight.dtype in HALVES and is_quicker_widened(layer.weight.dtype)


def can_multiply(states, weight) -> bool:
    """Whether another product than PyTorch's own can have these: plain tensors on the CPU, outside of any trace."""
    if not states.is_cpu or states.dtype is not weight.dtype or not is_enabled():
        return False
    return _is_dense(states) and _is_dense(weight) and not is_transformed() and not torch.is_autocast_enabled("cpu")


def _is_dense(tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and tensor.numel() > 0 and (type(tensor) is torch.Tensor or tensor.is_contiguous())


class _Product(torch.autograd.Function):
    """y = x W^T + b with all three products of forward and backward by oneDNN."""

    @staticmethod
    def forward(ctx, states, weight, bias):
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        return onednn.product(states, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        states, weight = ctx.saved_tensors
        # For second derivatives the products must be differentiable themselves.
        product = F.linear if torch.is_grad_enabled() else onednn.product
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
    return onednn.product if onednn.is_quicker_in_float32() else F.linear


def is_quicker_widened(dtype) -> bool:
    """Whether this processor multiplies many rows of a half precision faster in float32."""
    return is_measured(f"widened, {dtype}", functools.partial(_measure_widened, dtype))


@torch.no_grad()
def _measure_widened(dtype) -> bool:
    states, weight = random_matrix(64, 1024).to(dtype), random_matrix(1024, 1024).to(dtype)
    return is_quicker(lambda: _widened(states, weight, None), lambda: F.linear(states, weight), rounds=4)
