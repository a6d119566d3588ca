"""Faster matmuls of linear layers on a CPU: of plain weights, and of 4-bit weights by copies in other layouts.

Float32 is multiplied by oneDNN, few rows in parts, many rows of half precision by way of float32.

A compiled step has loops over bytes in the order of inputs. An AWQ word holds 8 outputs, so that a sum over inputs
strides through memory. There a byte holds two inputs of one output: one of the first half of their group in its lower
bits, one of the second half in its upper bits. A loop reads the bytes of an output one after the other, and gets
vectors of neighbouring inputs of both halves.

I inputs and O outputs of a linear layer, G inputs of a group that share a scale and a zero point.
"""

import threading
from collections.abc import Callable
from operator import is_

import torch
from torch import nn
from torch.nn import functional as F

from ..model.awq_linear import ABOVE, QuantizedLinear, raised
from ..watched import is_transformed
from .choices import IN_PARTS, ONEDNN, WIDENED, is_enabled, is_faster, is_seen
from .few_rows import MOST_ROWS, as_rows, computed_once, rows_of

# Into how many parts a weight is cut, by hand, and how many numbers it has at least: putting less together takes longer
# than it gains (benchmarks/thresholds.py).
_PARTS, _LEAST_IN_PARTS = 16, 1 << 17
# How wide its rows are at least, and how many rows of states one thread multiplies faster that way. By hand: 8,000 x 64
# takes 1.7 times as long in parts, and four rows of one thread take 1.5 times as long with 768 x 3,072 (1.1 with two).
_LEAST_INPUTS, _MOST_OF_ONE_THREAD = 128, MOST_ROWS - 1
_LEAST_COLUMNS = 8  # rows from which `in_columns` is faster with AVX-512; with AVX2 it is from five on. By hand.
# Multiplications below which nothing else gains; and below which oneDNN's overhead, tens of microseconds a call,
# costs more than it gains (benchmarks/thresholds.py).
_LEAST, _LEAST_WORK = _LEAST_IN_PARTS, 1 << 23
HALVES = (torch.float16, torch.bfloat16)
# Their rows from which converting the weights to float32 pays off (benchmarks/thresholds.py), and how many elements of
# the weights at a time, by hand: 64 MiB.
_MANY_ROWS, _WIDENED = 8, 1 << 24
# Up to this many rows are multiplied by the packed weights; with more it is faster to unpack them first
# (benchmarks/thresholds.py, on processors whose 4-bit matmul gains at all).
MOST_PACKED_ROWS = 32
# Of PyTorch's 4-bit matmul: whether it is there, inputs of a group, and outputs in steps of.
_IS_THERE, _GROUPS, _OUTPUTS = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"), (32, 64, 128, 256), 16


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
        if is_seen():
            return None
        weight, inputs, rows = self.weight, self.in_features, states.numel() // self.in_features
        size, learned = inputs * self.out_features, (states, weight, self.bias)
        learns = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in learned)
        if weight.dtype in HALVES:
            gains, way = rows >= _MANY_ROWS and not learns, WIDENED
        elif rows <= (MOST_ROWS if torch.get_num_threads() > 1 else _MOST_OF_ONE_THREAD) and not learns:
            gains, way = size >= _LEAST_IN_PARTS and inputs >= _LEAST_INPUTS, IN_PARTS
        else:
            gains, way = rows * size >= _LEAST_WORK, ONEDNN
        # What costs more to find out comes last. The error of states that do not fit is PyTorch's own.
        may = gains and is_faster(way, weight.dtype) and can_multiply(states, weight)
        if not may or states.shape[-1:] != (inputs,):
            return None
        return {WIDENED: _widened, IN_PARTS: in_parts, ONEDNN: _Product.apply if learns else by_onednn}[way]


def can_be_quick(layer: nn.Module) -> bool:
    """Whether a layer is a plain `nn.Linear` on the CPU for which another matmul than PyTorch's may be faster."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or layer.weight.dim() != 2:
        return False
    return any(is_faster(way, layer.weight.dtype) for way in (IN_PARTS, ONEDNN, WIDENED))


def in_parts(states, weight, bias=None):
    """`F.linear` of float32 states [..., I] that are few rows, weight [O, I], as a batch of matmuls of its parts.

    MKL reads a weight for one row, or for a few, with one thread, and the weights of a batch with all of them. One
    thread by itself reads a large weight faster so, too.
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


def may_multiply_otherwise(states) -> bool:
    """Whether only the result of a matmul of these states counts: on the CPU, with no trace, transform or autocast."""
    return states.is_cpu and is_enabled() and not is_transformed() and not torch.is_autocast_enabled("cpu")


def can_multiply(states, weight) -> bool:
    """Whether another matmul than PyTorch's can have these, if one may take its place: plain tensors of one dtype."""
    has_one_dtype = states.dtype is weight.dtype
    return has_one_dtype and may_multiply_otherwise(states) and is_dense(states) and is_dense(weight)


def is_dense(tensor) -> bool:
    """Whether a tensor is of no other class, strided and not empty, and a parameter contiguous."""
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


class FourBitCopy(nn.Module):
    """The weights of a layer in another layout, as buffers: made when needed, and again once the layer's have changed.

    The weights are held, so that nothing else can come to lie in their memory. Writes through `.data`, and to tensors
    of inference mode, are not seen.

    Args:
        layer: the plain one, which it shares the bias with.
    """

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        self.layer = (layer,)  # in a tuple, so that PyTorch does not list it as a submodule
        self.out_features, self.group_size = layer.out_features, layer.group_size
        vars(self)["_parameters"] = layer._parameters
        self._weights: list[torch.Tensor] = []
        self._state: list[int] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of the copy, once there is one."""
        return sum(each.nbytes for each in self.buffers())

    def refresh(self) -> None:
        """Make the copy if it is missing or out of date."""
        if self._is_current():
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self._is_current():  # a thread that waits for it may find it here
                weights = self._present()
                state = _state_of(weights)  # before the copy: a write meanwhile makes it again
                for name, tensor in self.made_of(*weights).items():
                    self.register_buffer(name, tensor.contiguous(), persistent=False)
                self._weights, self._state = weights, state

    def made_of(self, numbers, zeros, scales) -> dict[str, torch.Tensor]:
        """The copy by name, made of the layer's `qweight`, `qzeros` and `scales`."""
        raise NotImplementedError

    def _present(self) -> list[torch.Tensor]:
        held = self.layer[0]._buffers
        return [held[name] for name in ("qweight", "qzeros", "scales")]  # type: ignore[misc]

    def _is_current(self) -> bool:
        present = self._present()
        return len(self._weights) > 0 and all(map(is_, present, self._weights)) and _state_of(present) == self._state


def _state_of(tensors: list) -> list[int]:
    """Where tensors lie, and how often each has been written to."""
    return [each.data_ptr() for each in tensors] + [each._version for each in tensors if not each.is_inference()]


class PreparedQuantizedLinear(QuantizedLinear):
    """`QuantizedLinear` with PyTorch's 4-bit matmul. A plain layer becomes one by changing its class.

    The first call of few bfloat16 rows on a CPU makes a copy of the weights, in the layout of that matmul, which
    multiplies other dtypes no faster than plain weights made for the call.

    Shapes: [..., I] -> [..., O].
    """

    _copy: "PackedCopy | None" = None

    def forward(self, states):
        if not self._takes(states):
            return super().forward(states)
        if (copy := self._copy) is None:
            copy = vars(self)["_copy"] = PackedCopy(self)  # an attribute would be a part of the model
        copy.refresh()  # this one, whatever other threads put there or a cast takes away
        output = copy.multiply(states)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _takes(self, states) -> bool:
        """Whether PyTorch's 4-bit matmul knows these, and nobody else is to see plain operations."""
        if states.dtype is not torch.bfloat16 or not self.qweight.is_cpu or not may_multiply_otherwise(states):
            return False
        if not _IS_THERE or self.group_size not in _GROUPS or self.out_features % _OUTPUTS or _is_visiting(self):
            return False
        is_few = 0 < states.numel() // self.in_features <= MOST_PACKED_ROWS
        return is_few and not (torch.is_grad_enabled() and states.requires_grad)

    def _apply(self, fn, recurse=True):
        self._copy = None
        return super()._apply(fn, recurse)

    def __getstate__(self):
        return {**self.__dict__, "_copy": None}


def _is_visiting(layer) -> bool:
    """Whether the weights are resident only during a call: accelerate's offloading, DataParallel.

    Otherwise every call would make a copy and leave it behind.
    """
    own = vars(layer)
    hook = own.get("_hf_hook")
    return "_is_replica" in own or any(getattr(each, "offload", False) for each in getattr(hook, "hooks", [hook]))


class PackedCopy(FourBitCopy):
    """The weights of a layer as PyTorch's 4-bit matmul on a CPU reads them."""

    packed_numbers: torch.Tensor
    packed_scales: torch.Tensor

    def multiply(self, states):
        """[..., I] -> [..., O], without a bias."""
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        arguments = (self.packed_numbers, self.group_size, self.packed_scales)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, *arguments).view(*states.shape[:-1], -1)

    def made_of(self, numbers, zeros, scales):
        """The numbers, and scales and zeros, in its layout."""
        numbers, scales = unpack(numbers).t().to(torch.int32).contiguous(), scales.float()  # numbers [O, I]
        # It takes each number less 8 times the scale, plus a zero term.
        return {
            "packed_numbers": torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1),
            "packed_scales": torch.stack([scales, (8 - unpack(zeros).float()) * scales], dim=-1).bfloat16(),
        }


def unpack(words):
    """Words, int32 [R, O / 8] -> their numbers from 0 to 15, float16 [R, O]."""
    return raised(words, torch.float16).sub_(ABOVE[torch.float16][1])


class OrderedLinear(FourBitCopy):
    """A layer of 4-bit weights in a compiled step, with a second copy of them in a loop's order.

    Shapes: [..., I] -> [..., O].
    """

    ordered_numbers: torch.Tensor
    ordered_zeros: torch.Tensor
    ordered_scales: torch.Tensor
    bias: torch.Tensor | None
    rows: int

    def forward(self, states):
        """As `F.linear` of few rows; summed in float32."""
        numbers, zeros, scales = self.ordered_numbers.to(torch.int32), self.ordered_zeros, self.ordered_scales
        lower, both = (numbers & 15).float(), numbers.float()
        inputs = rows_of(states, self.rows).unflatten(1, (-1, 2, self.group_size // 2))  # [R, I / G, 2, G / 2]
        # lower * first + upper * second, without a shift: a byte is lower + 16 * upper.
        of_both = computed_once(inputs[:, :, 1] / 16)
        of_lower = computed_once(inputs[:, :, 0] - inputs[:, :, 1] / 16)
        sums = computed_once(inputs.sum((2, 3)))  # a zero point takes the same away from all inputs of a group
        outputs = [
            ((lower * of_lower[row] + both * of_both[row]) * scales[..., None]).sum((1, 2))
            - (zeros.float() * scales * sums[row]).sum(1)
            for row in range(len(inputs))
        ]
        return as_rows(outputs, states, self.bias)

    def made_of(self, numbers, zeros, scales):
        """The weights in order."""
        numbers, zeros = (unpack(words).t().to(torch.uint8) for words in (numbers, zeros))
        halves = numbers.reshape(self.out_features, -1, 2, self.group_size // 2)
        ordered = halves[:, :, 0] | (halves[:, :, 1] << 4)
        return {"ordered_numbers": ordered, "ordered_zeros": zeros, "ordered_scales": scales.t().float()}
