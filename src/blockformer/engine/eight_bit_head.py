"""A head in 8 bits for the tokens that a model writes: half the bytes of bfloat16, a quarter of float32.

Each token reads the whole head, a quarter of Qwen3-0.6B's weights and more than half of them if the layers have 4 bits.

C hidden size, V vocabulary.
"""

import torch
from torch import nn

from .few_rows import are_few, as_rows, rows_of
from .linear import QuickLinear, is_bare
from .measure import is_own_trace
from .onednn import writes_to

_COPY_ROWS = 1 << 14  # rows of the copy that are made at a time, by way of float32
_BUFFERS = ("rounded_weight", "row_scales")


class EightBitHead(QuickLinear):
    """`QuickLinear` of which the engine's own graphs read a rounded copy, if they are for few rows.

    A plain layer becomes one by changing its class. Each row of the weight is integers from -127 to 127 times a scale
    of its own.

    Shapes: [..., C] -> [..., V].
    """

    rounded_weight: torch.Tensor  # int8 [V, C]
    row_scales: torch.Tensor  # float32 [V]
    _origin: tuple | None = None  # the weight that the copy was made of, and how often it had been written to

    def forward(self, states):
        if not is_own_trace() or not are_few(states):
            return super().forward(states)
        weight = self.rounded_weight.to(torch.int32).float()  # without the step between, the loop is four times as slow
        outputs = [(weight * row).sum(-1) * self.row_scales for row in rows_of(states)]
        return as_rows(outputs if self.bias is None else [output + self.bias.float() for output in outputs], states)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the copy, or make it anew if the weight has changed."""
        weight = self.weight
        if self._origin is not None and self._origin[0] is weight and self._origin[1] == writes_to(weight):
            return
        origin = (weight, writes_to(weight))  # before the copy: a write meanwhile makes it anew
        copies = zip(*map(_rounded, weight.detach().split(_COPY_ROWS)), strict=True)
        for name, parts in zip(_BUFFERS, copies, strict=True):
            self.register_buffer(name, torch.cat(parts), persistent=False)
        self._origin = origin

    def forget(self) -> None:
        """Free the copy."""
        self._origin = None
        for name in _BUFFERS:
            self._buffers.pop(name, None)


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
    if not isinstance(head, nn.Linear) or not is_bare(head):
        raise ValueError(f"head_bits=8 is for a plain head; this one is a {type(head).__name__}, or has hooks.")
    if head.weight.dtype is torch.float64:
        raise ValueError("head_bits=8 is for float32 and half precision; this model is in float64.")


def put_in(model) -> None:
    """Have the model's graphs read its head in 8 bits."""
    head = model.get_output_embeddings()
    if type(head) in (nn.Linear, QuickLinear):
        head.__class__ = EightBitHead
        head.refresh()
