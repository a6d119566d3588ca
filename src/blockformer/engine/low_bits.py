"""4-bit weights in the layouts of faster matmuls on a CPU, in addition to the layer's own.

A compiled step has loops over bytes in the order of inputs. An AWQ word holds 8 outputs, so that a sum over inputs
strides through memory. There a byte holds two inputs of one output: one of the first half of their group in its lower
bits, one of the second half in its upper bits. A loop reads the bytes of an output one after the other, and gets
vectors of neighbouring inputs of both halves.

I inputs and O outputs of a layer, G inputs of a group that share a scale and a zero point.
"""

import threading
from operator import is_

import torch
from torch import nn

from ..model.awq_linear import ABOVE, QuantizedLinear, raised
from ..watched import is_transformed
from .choices import is_enabled
from .few_rows import Rows, as_rows, computed_once, rows_of

# Up to this many rows are multiplied by the packed weights; with more it is faster to unpack them first
# (benchmarks/thresholds.py, on processors whose 4-bit matmul gains at all).
MOST_PACKED_ROWS = 32
# Of PyTorch's 4-bit matmul: whether it is there, inputs of a group, and outputs in steps of.
_IS_THERE, _GROUPS, _OUTPUTS = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"), (32, 64, 128, 256), 16


class FourBitCopy(nn.Module):
    """The weights of a layer in another layout, as buffers: made when needed, and again once the layer's have changed.

    The weights are held, so that nothing else can come to lie in their memory. Writes through `.data`, and to tensors
    of inference mode, are not seen.

    Args:
        layer: the plain one, which it shares the bias with.
    """

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        self.layer = (layer,)  # in a tuple, so that it is no part of this module
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
        if self._copy is None:
            vars(self)["_copy"] = PackedCopy(self)  # an attribute would be a part of the model
        self._copy.refresh()
        output = self._copy.multiply(states)
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
    rows: Rows

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

    def made_of(self, numbers, zeros, scales):
        """The weights in order."""
        numbers, zeros = (unpack(words).t().to(torch.uint8) for words in (numbers, zeros))
        halves = numbers.reshape(self.out_features, -1, 2, self.group_size // 2)
        ordered = halves[:, :, 0] | (halves[:, :, 1] << 4)
        return {"ordered_numbers": ordered, "ordered_zeros": zeros, "ordered_scales": scales.t().float()}
