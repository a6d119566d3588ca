"""A head in 8 bits for the tokens that a model writes: half the bytes of bfloat16, a quarter of float32.

Each token reads the whole head, a quarter of Qwen3-0.6B's weights and more than half of them if the layers have 4 bits.

C hidden size, V vocabulary.
"""

import threading

import torch
from torch import nn

from .few_rows import are_few, as_rows, rows_of
from .linear import QuickLinear, is_bare
from .measure import is_own_trace
from .origin import Origin, kept, put_copy
from .packed import PackedLinear

_lock = threading.Lock()
_ROWS = 1 << 14  # rows that are rounded at a time, by way of float32
ROUNDED = ("rounded_weight", "row_scales")  # the buffers of the copy


class EightBitHead(QuickLinear):
    """`QuickLinear` of which the engine's own graphs read a rounded copy, if they are for few rows.

    A plain layer becomes one by changing its class. Each row of the weight is integers from -127 to 127 times a scale
    of its own.

    Shapes: [..., C] -> [..., V].
    """

    rounded_weight: torch.Tensor  # int8 [V, C]
    row_scales: torch.Tensor  # float32 [V]
    _origin: Origin | None = None  # of the copy

    def forward(self, states):
        if not is_own_trace() or not are_few(states):
            return super().forward(states)
        weight = self.rounded_weight.to(torch.int32).float()  # without the step between, the loop is four times as slow
        outputs = [(weight * row).sum(-1) * self.row_scales for row in rows_of(states)]
        return as_rows(outputs, states, self.bias)

    def refresh(self) -> None:
        """Make the copy, or make it again if the weight has changed."""
        if not self._is_current():
            with _lock, torch.inference_mode(False), torch.no_grad():
                if not self._is_current():  # a thread that waits for it may find it made
                    self._make()

    def _is_current(self) -> bool:
        return self._origin is not None and self._origin.is_of([(self._parameters, "weight")])

    def _make(self) -> None:
        origin = Origin(
            [(self._parameters, "weight")], sampled=True
        )  # before the copy: a write meanwhile makes it again
        copies = zip(*map(_rounded, self.weight.detach().split(_ROWS)), strict=True)
        for name, parts in zip(ROUNDED, copies, strict=True):
            put_copy(self, name, torch.cat(parts))
        self._origin = origin

    def _apply(self, fn, recurse=True):
        with kept(self, ROUNDED):
            return super()._apply(fn, recurse)

    def forget(self) -> None:
        """Free the copy."""
        vars(self).pop("_origin", None)
        for name in ROUNDED:
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
    if type(head) not in (nn.Linear, QuickLinear, EightBitHead, PackedLinear) or not is_bare(head):
        raise ValueError(
            f"head_bits=8 needs a plain head; this one is a {type(head).__name__}, or has hooks: leave it out."
        )
    if model.dtype is torch.float64:
        raise ValueError("head_bits=8 needs float32 or half precision; this model is in float64: cast it first.")


def put_in(model) -> None:
    """Have the model's graphs read its head in 8 bits."""
    head = model.get_output_embeddings()
    head.__class__ = EightBitHead
    head.refresh()
