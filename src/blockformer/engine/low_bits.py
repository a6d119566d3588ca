"""Weights of 4 bits in the layouts of faster matmuls on a CPU, and a head in 8 bits for the tokens that a model writes.

A compiled step has loops over bytes in the order of inputs. An AWQ word holds 8 outputs, so that a sum over inputs
strides through memory. There a byte holds two inputs of one output: one of the first half of their group in its lower
bits, one of the second half in its upper bits. A loop reads the bytes of an output one after the other, and gets
vectors of neighbouring inputs of both halves.

Each token reads the whole head, a quarter of Qwen3-0.6B's weights and more than half of them if the layers have 4 bits.
In 8 bits it has half the bytes of bfloat16, a quarter of float32.

I inputs and O outputs of a layer, G inputs of a group that share a scale and a zero point; C hidden size, V vocabulary.
"""

import threading
from operator import is_

import torch
from torch import nn

from ..model.awq_linear import ABOVE, QuantizedLinear, raised
from ..watched import is_bare, is_transformed
from .choices import is_enabled
from .few_rows import Rows, as_rows, computed_once, rows_of
from .linear import QuickLinear
from .packed import PackedLinear

_SAMPLED = 16  # numbers of a weight at most, by hand
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Following:
    """Copies of weights in another layout, made once they are needed, and again once the weights have changed.

    The weights and their memory are held, so that nothing else can come to lie there. Writes to tensors of inference
    mode are not counted. A copy or a pickle of it starts without copies: its tensors' writes are counted from zero.

    Args:
        copies: each with the `holders` of what it is a copy of (for each tensor the dict of its module that holds it,
            and its name there), and `make`, which makes it.
        sampled: look at some of their numbers as well, since PyTorch does not count a write through `.data`, by which
            adapters are merged. A write to single numbers, or to few rows or columns, may stay unseen.
    """

    def __init__(self, copies: list, sampled: bool = False):
        self.copies, self._sampled = copies, sampled
        self._holders = [holder for copy in copies for holder in copy.holders]
        self._tensors: list | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(each.numel() * each.element_size() for copy in self.copies for each in copy.buffers())

    def refresh(self) -> None:
        """Make the copies that are missing or out of date."""
        if self._is_current():
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self._is_current():  # a thread that waits for it may find them here
                tensors = [held[name] for held, name in self._holders]
                self._memory = [tensor.detach() for tensor in tensors]
                self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
                self._samples = [_sample_of(tensor) for tensor in self._memory] if self._sampled else []
                state = self._state_of(tensors)  # before the copies: a write meanwhile makes them again
                for copy in self.copies:
                    copy.make()
                self._tensors, self._state = tensors, state

    def _is_current(self) -> bool:
        if not self.copies:
            return True
        tensors = self._tensors
        if tensors is None or not all(map(is_, [held.get(name) for held, name in self._holders], tensors)):
            return False
        return self._state_of(tensors) == self._state

    def _state_of(self, tensors: list) -> list:
        # A compiled step checks all 4-bit weights by this.
        now: list = [tensor.data_ptr() for tensor in tensors] + [tensor._version for tensor in self._counted]
        return now + [sample.tobytes() for sample in self._samples]


def _sample_of(tensor):
    """A NumPy array over the memory of some numbers of a weight [O, I], of any dtype, as integers.

    They lie on its diagonal: whoever writes to some rows or columns, such as a head's, writes to one of them.
    """
    numbers = tensor.view(_INTEGERS[tensor.element_size()])
    steps = [-(-size // _SAMPLED) for size in tensor.shape]
    count = min(-(-size // step) for size, step in zip(tensor.shape, steps, strict=True))
    stride = sum(step * each for step, each in zip(steps, tensor.stride(), strict=True))
    return numbers.as_strided((count,), (stride,)).numpy()


# Up to this many rows are multiplied by the packed weights; with more it is faster to unpack them first
# (benchmarks/thresholds.py, on processors whose 4-bit matmul gains at all).
MOST_PACKED_ROWS = 32
# Of PyTorch's 4-bit matmul: whether it is there, inputs of a group, and outputs in steps of.
_IS_THERE, _GROUPS, _OUTPUTS = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"), (32, 64, 128, 256), 16
_PIECE = 1 << 14  # rows of a head that are rounded at a time, by way of float32; by hand


class PreparedQuantizedLinear(QuantizedLinear):
    """`QuantizedLinear` with PyTorch's 4-bit matmul. A plain layer becomes one by changing its class.

    The first call of few bfloat16 rows on a CPU makes a copy of the weights, in the layout of that matmul, which
    multiplies other dtypes no faster than plain weights made for the call.

    Shapes: [..., I] -> [..., O].
    """

    _copy: Following | None = None

    def forward(self, states):
        if not self._takes(states):
            return super().forward(states)
        if self._copy is None:
            self._copy = Following([_Packed(self)])
        self._copy.refresh()
        output = self._copy.copies[0].multiply(states)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _takes(self, states) -> bool:
        """Whether PyTorch's 4-bit matmul knows these, and nobody else is to see plain operations."""
        if states.dtype is not torch.bfloat16 or not states.device.type == self.qweight.device.type == "cpu":
            return False
        if not _IS_THERE or self.group_size not in _GROUPS or self.out_features % _OUTPUTS or _is_visiting(self):
            return False
        if not is_enabled() or is_transformed() or torch.is_autocast_enabled("cpu"):
            return False
        is_few = 0 < states.numel() // self.in_features <= MOST_PACKED_ROWS
        return is_few and not (torch.is_grad_enabled() and states.requires_grad)

    def _apply(self, fn, recurse=True):
        self._copy = None
        return super()._apply(fn, recurse)

    def __getstate__(self):
        return {**self.__dict__, "_copy": None}


def _holders_of(layer: QuantizedLinear) -> list[tuple[dict, str]]:
    """Where a layer holds its 4-bit weights, see `Following`."""
    return [(layer._buffers, name) for name in ("qweight", "qzeros", "scales")]


def _is_visiting(layer) -> bool:
    """Whether the weights are resident only during a call: accelerate's offloading, DataParallel.

    Otherwise every call would make a copy and leave it behind.
    """
    own = vars(layer)
    hook = own.get("_hf_hook")
    return "_is_replica" in own or any(getattr(each, "offload", False) for each in getattr(hook, "hooks", [hook]))


class _Packed:
    """The weights of a layer as PyTorch's 4-bit matmul on a CPU reads them."""

    def __init__(self, layer: QuantizedLinear):
        self.holders, self.group_size = _holders_of(layer), layer.group_size
        self._held: list[torch.Tensor] = []

    def make(self) -> None:
        """Put the weights, and scales and zeros, into its layout."""
        numbers, zeros, scales = (held[name] for held, name in self.holders)
        numbers = unpack(numbers).t().to(torch.int32)  # [O, I]
        # It takes each number less 8 times the scale, plus a zero term.
        scales = scales.float()
        table = torch.stack([scales, (8 - unpack(zeros).float()) * scales], dim=-1).bfloat16()
        self._held[:] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.contiguous(), 1), table

    def buffers(self) -> list[torch.Tensor]:
        """The copy, once there is one."""
        return self._held

    def multiply(self, states):
        """[..., I] -> [..., O], without a bias."""
        (weight, table), rows = self._held, states.reshape(-1, states.shape[-1]).contiguous()
        output = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, self.group_size, table)
        return output.view(*states.shape[:-1], -1)


def unpack(words):
    """Words, int32 [R, O / 8] -> their numbers from 0 to 15, float16 [R, O]."""
    return raised(words, torch.float16).sub_(ABOVE[torch.float16][1])


class OrderedLinear(nn.Module):
    """A layer of 4-bit weights in a compiled step, with a second copy of them in a loop's order.

    Shapes: [..., I] -> [..., O].

    Args:
        layer: the plain one, which it shares the bias with.
    """

    ordered_numbers: torch.Tensor
    ordered_zeros: torch.Tensor
    ordered_scales: torch.Tensor
    bias: torch.Tensor | None
    rows: Rows

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        self.holders = _holders_of(layer)
        self.layers = (layer,)  # no part of this one
        self.out_features, self.group_size = layer.out_features, layer.group_size
        vars(self)["_parameters"] = layer._parameters

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
        return as_rows(outputs, states, self.rows, self.bias)

    def make(self) -> None:
        """Put the weights in order."""
        (layer,) = self.layers
        numbers, zeros = (unpack(words).t().to(torch.uint8) for words in (layer.qweight, layer.qzeros))
        halves = numbers.reshape(self.out_features, -1, 2, self.group_size // 2)
        copies = {
            "ordered_numbers": halves[:, :, 0] | (halves[:, :, 1] << 4),
            "ordered_zeros": zeros,
            "ordered_scales": layer.scales.t().float(),
        }
        for name, tensor in copies.items():
            self.register_buffer(name, tensor.contiguous(), persistent=False)


class RoundedHead(nn.Module):
    """A head in a compiled step for few rows. Each row of its weight is integers from -127 to 127 times a scale.

    Shapes: [..., C] -> [..., V].

    Args:
        head: the plain one, which it shares the bias with.
    """

    rounded_weight: torch.Tensor  # int8 [V, C]
    row_scales: torch.Tensor  # float32 [V]
    rows: Rows

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.layers = (head,)  # no part of this one
        self.holders = [(head._parameters, "weight")]
        vars(self)["_parameters"] = head._parameters

    def forward(self, states):
        """As `F.linear`, for few rows."""
        weight = self.rounded_weight.to(torch.int32).float()  # without the step between, the loop is four times as slow
        outputs = [(weight * row).sum(-1) * self.row_scales for row in rows_of(states, self.rows)]
        return as_rows(outputs, states, self.rows, self.bias)

    def make(self) -> None:
        """Round the weight."""
        pieces = zip(*map(_rounded, self.weight.detach().split(_PIECE)), strict=True)
        for name, parts in zip(("rounded_weight", "row_scales"), pieces, strict=True):
            self.register_buffer(name, torch.cat(parts), persistent=False)


def _rounded(weight):
    """A weight [V, C] as int8 [V, C] and its scales, float32 [V]."""
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    return (weight / torch.where(scales == 0, 1.0, scales)[:, None]).round().to(torch.int8), scales


def check_head(model) -> None:
    """Refuse a model whose head cannot be read in 8 bits.

    Raises:
        ValueError: it is in float64, or something wraps its head.
    """
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, QuickLinear, PackedLinear) or not is_bare(head):
        raise ValueError(
            f"head_bits=8 needs a plain head; this one is a {type(head).__name__}, or has hooks: leave it out."
        )
    if model.dtype is torch.float64:
        raise ValueError("head_bits=8 needs float32 or half precision; this model is in float64: cast it first.")
