"""The product of one row with 4-bit weights, written out for the compiler: a loop over words in the order of inputs.

An AWQ word holds 8 outputs, so that a sum over inputs strides through memory. Here it holds 8 inputs of one output: a
loop reads the words of an output one after the other, and each of the 8 shifts gives a vector of neighbouring inputs.

I inputs and O outputs of a layer, G inputs of a group, L words of a block, which are the 8 * L inputs of P groups.
"""

import torch

from .four_bits import PreparedQuantizedLinear, unpack
from .measure import is_own_trace
from .one_row import computed_once

_PLACES = 8  # in a word
_LEAST_BLOCK = 128  # inputs, so that 16 neighbours have one shift and one scale where groups are shorter, too


class TracedQuantizedLinear(PreparedQuantizedLinear):
    """`PreparedQuantizedLinear` of which the engine's own graphs of one row read a second copy, in a loop's order.

    A plain layer becomes one by changing its class, and has the copy from `put_in_order` on.

    Shapes: [..., I] -> [..., O].
    """

    ordered_words: torch.Tensor
    ordered_zeros: torch.Tensor
    ordered_scales: torch.Tensor

    def forward(self, states):
        if is_own_trace() and states.numel() == self.in_features:
            return self._one_row(states)
        return super().forward(states)

    @torch.no_grad()
    def put_in_order(self) -> None:
        """Make the copy of the current weights, in buffers that no state dict has."""
        parts = _groups_of_a_block(self.in_features, self.group_size)
        numbers = unpack(self.qweight).t().to(torch.int32, memory_format=torch.contiguous_format)  # [O, I]
        numbers ^= 8  # 4 bits of the number less 8, with its sign: sums of such are smaller, and rounded less
        planes = numbers.view(self.out_features, -1, _PLACES, parts * self.group_size // _PLACES)
        words = planes[:, :, 0].contiguous()
        for place in range(1, _PLACES):
            words |= planes[:, :, place] << (4 * place)
        self.register_buffer("ordered_words", words, persistent=False)
        zeros, scales = (unpack(self.qzeros) - 8).to(torch.int8), self.scales.float()
        for name, tensor in (("ordered_zeros", zeros), ("ordered_scales", scales)):
            self.register_buffer(name, tensor.t().reshape(*words.shape[:2], parts).contiguous(), persistent=False)

    def forget_order(self) -> None:
        """Free the copy."""
        for name in ("ordered_words", "ordered_zeros", "ordered_scales"):
            if name in self._buffers:
                delattr(self, name)

    def _one_row(self, states):
        """[..., I] that are one row -> [..., O]; summed in float32."""
        words, zeros, scales = self.ordered_words, self.ordered_zeros, self.ordered_scales
        (_, blocks, parts), lanes = scales.shape, words.shape[2]
        inputs = computed_once(states.reshape(blocks, parts, _PLACES // parts, lanes))
        above = (28 - 4 * torch.arange(_PLACES, dtype=torch.int32)).view(parts, -1, 1)  # bits of a word
        numbers = ((words[:, :, None, None, :] << above) >> 28).float()  # [O, blocks, parts, places of a part, lanes]
        # A zero point takes the same away from all inputs of a group.
        sums = computed_once(inputs.sum((2, 3)))
        output = (numbers * inputs * scales[..., None, None]).sum((1, 2, 3, 4)) - (zeros.float() * scales * sums).sum(
            (1, 2)
        )
        output = output if self.bias is None else output + self.bias.float()
        return output.to(states.dtype).reshape(*states.shape[:-1], -1)


class OrderedWeights:
    """The copies of a model's 4-bit layers, which follow their weights.

    Args:
        model: what holds the layers; other 4-bit layers than `TracedQuantizedLinear` do not matter.
    """

    def __init__(self, model):
        self._model = model
        self._sources: list[tuple] | None = None

    def refresh(self) -> None:
        """Make the copies that are missing, or whose weights have changed."""
        if self._sources is not None and all(
            held.get(name) is tensor and (version is None or tensor._version == version)
            for held, name, tensor, version in self._sources
        ):
            return
        layers = [module for module in self._model.modules() if isinstance(module, TracedQuantizedLinear)]
        for layer in layers:
            layer.put_in_order()
        held = [(layer._buffers, name) for layer in layers for name in ("qweight", "qzeros", "scales")]
        tensors = [buffers[name] for buffers, name in held]
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        self._sources = [(*place, *rest) for place, *rest in zip(held, tensors, versions, strict=True)]


def can_be_in_order(layer) -> bool:
    """Whether the groups of a 4-bit layer are whole words."""
    return layer.group_size % _PLACES == 0


def _groups_of_a_block(in_features: int, group_size: int) -> int:
    """Of neighbouring groups how many share the words of a block: 1, or so many that the block is long enough."""
    parts = _LEAST_BLOCK // group_size
    fits = parts in (2, 4, 8) and parts * group_size == _LEAST_BLOCK and in_features % _LEAST_BLOCK == 0
    return parts if fits else 1
