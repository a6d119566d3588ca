"""Faster matmuls with plain weights: oneDNN's float32, few rows in parts, many of half precision by way of float32.

I inputs and O outputs of a linear layer.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from ..watched import is_transformed
from .choices import IN_PARTS, ONEDNN, WIDENED, is_enabled, is_faster
from .few_rows import MOST_ROWS

# Into how many parts a weight is cut, by hand, and how many numbers it has at least: putting less together takes longer
# than it gains (benchmarks/thresholds.py).
_PARTS, _LEAST_IN_PARTS = 16, 1 << 17
_LEAST_COLUMNS = 8  # rows from which `in_columns` is faster with AVX-512; with AVX2 it is from five on. By hand.
# Multiplications below which nothing else gains; and below which oneDNN's overhead, tens of microseconds a call,
# costs more than it gains (benchmarks/thresholds.py).
_LEAST, _LEAST_WORK = _LEAST_IN_PARTS, 1 << 23
HALVES = (torch.float16, torch.bfloat16)
# Their rows from which converting the weights to float32 pays off (benchmarks/thresholds.py), and how many elements of
# the weights at a time, by hand: 64 MiB.
_MANY_ROWS, _WIDENED = 8, 1 << 24


def by_onednn(states, weight, bias=None):
    """`F.linear` [..., I] -> [..., O] of a plain weight [O, I], or of a packed one."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


@torch.library.custom_op("blockformer::by_onednn", mutates_args=())
def by_onednn_in_a_graph(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`by_onednn` as an operator: compiled code calls oneDNN's own with constant weights only."""
    return by_onednn(states, weight, bias)


@by_onednn_in_a_graph.register_fake
def _(states, weight, bias):
    return states.new_empty(*states.shape[:-1], weight.shape[0])


def in_columns(states, weight, bias=None):
    """`F.linear` of float32 states [..., I] of some rows, with the weight [O, I] first and the rows as columns.

    MKL then reads the weight where it lies, and does not copy it into another layout at each call.
    """
    rows = states.reshape(-1, states.shape[-1])
    if rows.shape[0] < _LEAST_COLUMNS:
        return F.linear(states, weight, bias)
    outputs = torch.mm(weight, rows.t()).t().contiguous().reshape(*states.shape[:-1], weight.shape[0])
    return outputs if bias is None else outputs + bias


class QuickLinear(nn.Linear):
    """`nn.Linear` on the CPU by the faster matmul. A plain layer becomes one by changing its class.

    On some processors PyTorch's float32 matmul reaches about half of the speed of oneDNN's. Both sum in float32, in
    a different order. Many rows of half precision are multiplied in float32 where the processor cannot multiply them.

    Shapes: [..., I] -> [..., O].
    """

    def forward(self, states):
        # A token of a small model takes no longer than these questions, so they come first, and no others.
        if states.numel() * self.out_features < _LEAST:
            return F.linear(states, self.weight, self.bias)
        return (self._matmul(states) or F.linear)(states, self.weight, self.bias)

    def _matmul(self, states) -> Callable | None:
        """Another matmul than PyTorch's own, if that is faster for these states."""
        weight, rows = self.weight, states.numel() // self.in_features
        if weight.dtype not in (torch.float32, *HALVES) or not can_multiply(states, weight):
            return None
        if states.shape[-1:] != (self.in_features,):
            return None  # the error is PyTorch's own
        learned = (states, weight) if self.bias is None else (states, weight, self.bias)
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in learned)
        if weight.dtype in HALVES:
            return _widened if rows >= _MANY_ROWS and not learns and is_faster(WIDENED, weight.dtype) else None
        if rows <= MOST_ROWS and not learns:
            can_gain = weight.numel() >= _LEAST_IN_PARTS and torch.get_num_threads() > 1
            return in_parts if can_gain and is_faster(IN_PARTS, weight.dtype) else None
        is_large = rows * weight.numel() >= _LEAST_WORK
        return (_Product.apply if learns else by_onednn) if is_large and is_faster(ONEDNN, weight.dtype) else None


def can_be_quick(layer: nn.Module) -> bool:
    """Whether a layer is a plain `nn.Linear` on the CPU for which another matmul than PyTorch's may be faster."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or layer.weight.dim() != 2:
        return False
    return any(is_faster(way, layer.weight.dtype) for way in (IN_PARTS, ONEDNN, WIDENED))


def in_parts(states, weight, bias=None):
    """`F.linear` of float32 states [..., I] that are few rows, weight [O, I], as a batch of matmuls of its parts.

    MKL reads a weight for one row, or for a few, with one thread, and the weights of a batch with all of them.
    """
    size = len(weight) // _PARTS
    if size == 0:
        return F.linear(states, weight, bias)
    whole, rows = _PARTS * size, states.reshape(-1, states.shape[-1])
    parts = weight[:whole].view(_PARTS, size, -1)
    columns = rows.t().expand(_PARTS, -1, -1)  # [parts, I, R]: another order of the strides is much slower
    if bias is None:
        outputs = torch.bmm(parts, columns)
    else:
        outputs = torch.baddbmm(bias[:whole].view(_PARTS, size, 1), parts, columns)
    outputs = outputs.view(whole, -1).t().contiguous()  # attention is slower by others, and some code wants to view it
    if whole < len(weight):
        rest = F.linear(rows, weight[whole:], None if bias is None else bias[whole:])
        outputs = torch.cat([outputs, rest], 1)
    return outputs.reshape(*states.shape[:-1], len(weight))


def can_multiply(states, weight) -> bool:
    """Whether another matmul than PyTorch's own can have these: plain tensors on the CPU, outside of any trace."""
    if not states.is_cpu or states.dtype is not weight.dtype or not is_enabled():
        return False
    return _is_dense(states) and _is_dense(weight) and not is_transformed() and not torch.is_autocast_enabled("cpu")


def _is_dense(tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and tensor.numel() > 0 and (type(tensor) is torch.Tensor or tensor.is_contiguous())


class _Product(torch.autograd.Function):
    """y = x W^T + b with all three matmuls of forward and backward by oneDNN."""

    @staticmethod
    def forward(ctx, states, weight, bias):
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        return by_onednn(states, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        states, weight = ctx.saved_tensors
        # For second derivatives the matmuls must be differentiable themselves.
        multiply = F.linear if torch.is_grad_enabled() else by_onednn
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), states.reshape(-1, states.shape[-1])
        grad_states = multiply(grad, weight.t(), None) if needs_states else None
        grad_weight = multiply(rows.t(), inputs.t(), None) if needs_weight else None
        return grad_states, grad_weight, rows.sum(0) if ctx.has_bias and needs_bias else None


def _widened(states, weight, bias):
    """The matmul of half precision in float32, a few of the outputs at a time."""
    dtype, states, size = states.dtype, states.float(), max(1, _WIDENED // weight.shape[1])
    parts = zip(weight.split(size), [None] * len(weight) if bias is None else bias.split(size), strict=False)
    outputs = [F.linear(states, part.float(), each if each is None else each.float()).to(dtype) for part, each in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
