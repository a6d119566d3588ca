"""The float32 product of few rows as a batch of products, each with a part of the weight.

MKL reads a weight for one row, or for some, by one thread; those of a batch it reads by all of them.

I inputs and O outputs of a linear layer, R rows.
"""

import functools

import torch
from torch.nn import functional as F

from .few_rows import MOST_ROWS
from .measure import is_measured, is_quicker, random_matrix

_PARTS = 16
# Weights from which the product takes longer than putting a batch together.
LEAST_WEIGHTS = 1 << 17


def product(states, weight, bias=None):
    """`F.linear` of float32 states [..., I] that are few rows, weight [O, I]; summed in another order."""
    rows = states.reshape(-1, states.shape[-1])
    size = len(weight) // _PARTS
    if size == 0:
        return F.linear(states, weight, bias)
    whole = _PARTS * size
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


def is_quicker_for(rows: int) -> bool:
    """Whether this product of so many rows is faster here than PyTorch's own."""
    if not 0 < rows <= MOST_ROWS:
        return False
    rows = 1 if rows == 1 else MOST_ROWS
    return is_measured(f"in parts, {rows} rows", functools.partial(_measure, rows))


@torch.no_grad()
def _measure(rows: int) -> bool:
    """This takes some hundredths of a second."""
    weight, states = random_matrix(1024, 1024), random_matrix(rows, 1024)
    weights = [weight.clone() for _ in range(8)]
    if not torch.allclose(product(states, weight), F.linear(states, weight), atol=1e-3, rtol=1e-4):
        return False
    work, other = (lambda by=by: [by(states, weight) for weight in weights] for by in (product, F.linear))
    return is_quicker(work, other, rounds=8, share=0.8)
