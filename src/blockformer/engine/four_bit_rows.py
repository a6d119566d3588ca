"""Products with 4-bit weights, written out for the compiler: loops over bytes in the order of inputs.

An AWQ word holds 8 outputs, so that a sum over inputs strides through memory. Here a byte holds two inputs of one
output: one of the first half of their group in its lower bits, one of the second half in its upper bits. A loop reads
the bytes of an output one after the other, and gets vectors of neighbouring inputs of both halves. Few rows are
multiplied by it as it goes; for many it writes the weight out.

I inputs and O outputs of a layer, G inputs of a group.
"""

import threading

import torch
from torch.nn import functional as F

from .few_rows import are_few, as_rows, computed_once, rows_of
from .four_bits import PreparedQuantizedLinear, places_of, unpack
from .measure import is_own_trace
from .origin import Origin, kept, put_copy

_lock = threading.Lock()
ORDERED = ("ordered_numbers", "ordered_zeros", "ordered_scales")  # the buffers of the copy


class TracedQuantizedLinear(PreparedQuantizedLinear):
    """`PreparedQuantizedLinear` of which the engine's own graphs read a second copy, in a loop's order.

    A plain layer becomes one by changing its class, and has the copy from `put_in_order` on.

    Shapes: [..., I] -> [..., O].
    """

    ordered_numbers: torch.Tensor
    ordered_zeros: torch.Tensor
    ordered_scales: torch.Tensor
    _origin: Origin | None = None  # of the copy

    def forward(self, states):
        if not is_own_trace():
            return super().forward(states)
        return self._few_rows(states) if are_few(states) else self._many_rows(states)

    @torch.no_grad()
    def put_in_order(self) -> None:
        """Make the copy of the current weights, in buffers that no state dict has, unless there is one."""
        places = places_of(self)
        if self._origin is not None and self._origin.is_of(places):
            return
        origin = Origin(places)  # before the copy: a write meanwhile makes it again
        numbers, zeros = (unpack(words).t().to(torch.uint8) for words in (self.qweight, self.qzeros))
        halves = numbers.reshape(self.out_features, -1, 2, self.group_size // 2)
        bytes_ = halves[:, :, 0] | (halves[:, :, 1] << 4)
        for name, tensor in zip(ORDERED, (bytes_, zeros, self.scales.t().float()), strict=True):
            put_copy(self, name, tensor.contiguous())
        self._origin = origin

    def _apply(self, fn, recurse=True):
        with kept(self, ORDERED):
            return super()._apply(fn, recurse)

    def forget_order(self) -> None:
        """Free the copy."""
        self._origin = None
        for name in ORDERED:
            if name in self._buffers:
                delattr(self, name)

    def _few_rows(self, states):
        """[..., I] that are few rows -> [..., O]; summed in float32."""
        numbers, zeros, scales = self.ordered_numbers.to(torch.int32), self.ordered_zeros, self.ordered_scales
        lower, both = (numbers & 15).float(), numbers.float()
        inputs = rows_of(states).unflatten(1, (-1, 2, self.group_size // 2))  # [R, I / G, 2, G / 2]
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

    def _many_rows(self, states):
        """[..., I] -> [..., O], by a weight that is written out."""
        both, zeros = self.ordered_numbers.float(), self.ordered_zeros.float()[..., None]
        upper = (both / 16).floor()  # a shift takes the compiler's loop six times as long
        scales, parts = self.ordered_scales[..., None], (both - 16 * upper, upper)
        weight = torch.stack([((numbers - zeros) * scales).to(states.dtype) for numbers in parts], 2)
        return F.linear(states, weight.reshape(self.out_features, -1), self.bias)


class OrderedWeights:
    """The copies of a model's 4-bit layers, which follow their weights.

    Args:
        model: what holds the layers; other 4-bit layers than `TracedQuantizedLinear` do not matter.
    """

    def __init__(self, model):
        self._model = model
        self._places: list[tuple[dict, str]] = []
        self._origin: Origin | None = None

    def refresh(self) -> None:
        """Make the copies that are missing, or whose weights have changed."""
        if not self._are_current():
            with _lock, torch.inference_mode(False):  # a thread that waits for it may find them made
                if not self._are_current():
                    self._make()

    def _are_current(self) -> bool:
        return self._origin is not None and self._origin.is_of(self._places)

    def _make(self) -> None:
        layers = [module for module in self._model.modules() if isinstance(module, TracedQuantizedLinear)]
        self._places = places_of(*layers)
        origin = Origin(self._places)
        for layer in layers:
            layer.put_in_order()
        self._origin = origin


def can_be_in_order(layer) -> bool:
    """Whether the groups of a 4-bit layer have two halves."""
    return layer.group_size % 2 == 0
