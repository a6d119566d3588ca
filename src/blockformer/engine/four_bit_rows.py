"""Products with 4-bit weights, written out for the compiler: loops over bytes in the order of inputs.

An AWQ word holds 8 outputs, so that a sum over inputs strides through memory. Here a byte holds two inputs of one
output: one of the first half of their group in its lower bits, one of the second half in its upper bits. A loop reads
the bytes of an output one after the other, and gets vectors of neighbouring inputs of both halves. Few rows are
multiplied by it as it goes; for many it writes the weight out.

I inputs and O outputs of a layer, G inputs of a group.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..model.awq_linear import QuantizedLinear
from .few_rows import Rows, as_rows, computed_once, rows_of
from .four_bits import holders_of, unpack


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
    rows: Rows | None

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        self.holders = holders_of(layer)
        self.layers = (layer,)  # no part of this one
        self.out_features, self.group_size = layer.out_features, layer.group_size
        vars(self)["_parameters"] = layer._parameters

    def forward(self, states):
        """The product."""
        return self._many_rows(states) if self.rows is None else self._few_rows(states, self.rows)

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

    def _few_rows(self, states, rows: Rows):
        """[..., I] that are few rows -> [..., O]; summed in float32."""
        numbers, zeros, scales = self.ordered_numbers.to(torch.int32), self.ordered_zeros, self.ordered_scales
        lower, both = (numbers & 15).float(), numbers.float()
        inputs = rows_of(states, rows).unflatten(1, (-1, 2, self.group_size // 2))  # [R, I / G, 2, G / 2]
        # lower * first + upper * second, without a shift: a byte is lower + 16 * upper.
        of_both = computed_once(inputs[:, :, 1] / 16)
        of_lower = computed_once(inputs[:, :, 0] - inputs[:, :, 1] / 16)
        sums = computed_once(inputs.sum((2, 3)))  # a zero point takes the same away from all inputs of a group
        outputs = [
            ((lower * of_lower[row] + both * of_both[row]) * scales[..., None]).sum((1, 2))
            - (zeros.float() * scales * sums[row]).sum(1)
            for row in range(len(inputs))
        ]
        return as_rows(outputs, states, rows, self.bias)

    def _many_rows(self, states):
        """[..., I] -> [..., O], by a weight that is written out."""
        both, zeros = self.ordered_numbers.float(), self.ordered_zeros.float()[..., None]
        upper = (both / 16).floor()  # a shift takes the compiler's loop six times as long
        scales, parts = self.ordered_scales[..., None], (both - 16 * upper, upper)
        weight = torch.stack([((numbers - zeros) * scales).to(states.dtype) for numbers in parts], 2)
        return F.linear(states, weight.reshape(self.out_features, -1), self.bias)


def can_be_in_order(layer) -> bool:
    """Whether the groups of a 4-bit layer have two halves."""
    return layer.group_size % 2 == 0
