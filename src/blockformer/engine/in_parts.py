"""The float32 product of few rows as a batch of products, each with a part of the weight.

MKL reads a weight for one row, or for a few, with one thread, and the weights of a batch with all of them.

I inputs and O outputs of a linear layer, R rows.
"""

import torch
from torch.nn import functional as F

from .few_rows import MOST_ROWS
from .measure import is_measured, is_quicker, random_matrix, some_weights

_PARTS = 16
LEAST_WEIGHTS = 1 << 17
"""Weights below which putting a batch together takes longer than the product gains."""


def product(states, weight, bias=None):
    """`F.linear` of float32 states [..., I] that are few rows, weight [O, I]; summed in another order."""
    size = len(weight) // _PARTS
    if size == 0:
        return F.linear(states, weight, bias)
    whole = _PARTS * size
    is_whole = whole == len(weight)
    parts = (weight if is_whole else weight[:whole]).view(_PARTS, size, -1)
    rows = states.reshape(-1, states.shape[-1])
    columns = rows.t().expand(_PARTS, -1, -1)  # [parts, I, R]: another order of the strides is much slower
    if bias is None:
        outputs = torch.bmm(parts, columns)
    else:
        outputs = torch.baddbmm((bias if is_whole else bias[:whole]).view(_PARTS, size, 1), parts, columns)
    if is_whole and len(rows) == 1:
        return outputs.view(*states.shape[:-1], whole)
    outputs = outputs.view(whole, -1).t().contiguous()  # attention is slower by others, and some code wants to view it
    if not is_whole:
        rest = F.linear(rows, weight[whole:], None if bias is None else bias[whole:])
        outputs = torch.cat([outputs, rest], 1)
    return outputs.reshape(*states.shape[:-1], len(weight))


def is_quicker_for(rows: int, outputs: int, inputs: int) -> bool:
    """Whether this product of so many rows by a weight [outputs, inputs] is faster here than PyTorch's own."""
    if not 0 < rows <= MOST_ROWS or outputs * inputs < LEAST_WEIGHTS:
        return False
    rows = 1 if rows == 1 else MOST_ROWS
    return is_measured(("in parts", rows, outputs, inputs), lambda: _measure(rows, outputs, inputs))


@torch.no_grad()
def _measure(rows: int, outputs: int, inputs: int) -> bool:
    """This takes up to a tenth of a second."""
    states, weights = random_matrix(rows, inputs), some_weights(outputs, inputs)
    if not torch.allclose(product(states, weights[0]), F.linear(states, weights[0]), atol=1e-3, rtol=1e-4):
        return False
    work, other = (lambda by=by: [by(states, weight) for weight in weights] for by in (product, F.linear))
    return is_quicker(work, other, rounds=5, share=0.85)
