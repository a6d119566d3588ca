"""NaN and infinity among the elements of tensors."""

import math

import torch
from torch import Tensor

_ONE_THREAD = (1 << 15) - 64
"""Elements that PyTorch handles on one thread. Its other threads would busy-wait after each part and slow the I/O."""


def nonfinite(tensor: Tensor) -> int:
    """Count the NaN and infinite elements of a tensor, in a few MB of memory; 0 for integers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    count = 0
    for part in tensor.detach().reshape(-1).split(_ONE_THREAD):
        wide = part.float() if part.dtype.itemsize == 1 else part  # torch cannot test float8
        if not part.is_complex() and _has_finite_sum(wide):
            continue
        count += part.numel() - int(torch.isfinite(wide).sum())
    return count


def _has_finite_sum(part: Tensor) -> bool:
    """Whether the sum is finite, which proves every element finite, since NaN and infinity propagate.

    Much faster than counting. Finite elements may still overflow the sum (float16 easily does); then they are counted.
    """
    return math.isfinite(part.sum().item())
