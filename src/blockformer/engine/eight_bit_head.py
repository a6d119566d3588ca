"""A head in 8 bits for the tokens that a model writes: half the bytes of bfloat16, a quarter of float32.

Each token reads the whole head, a quarter of Qwen3-0.6B's weights and more than half of them if the layers have 4 bits.

C hidden size, V vocabulary.
"""

import torch
from torch import nn

from .few_rows import Rows, as_rows, rows_of
from .linear import QuickLinear
from .packed import PackedLinear
from .watched import is_bare

_PIECE = 1 << 14  # rows that are rounded at a time, by way of float32; by hand


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
        """The product of few rows."""
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
