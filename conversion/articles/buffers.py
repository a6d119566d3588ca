"""Checks of the buffers in an article's state dict: they are computed, and may be left out where they are right."""

import torch
from torch import Tensor

from .base import Check


def sinusoid(length: int, width: int) -> Check:
    """The check of a table [1, length, width] of interleaved sines and cosines (Vaswani et al., 2017, section 3.5)."""

    def check(table: Tensor) -> str | None:
        if tuple(table.shape) not in ((length, width), (1, length, width)):
            return f"is {list(table.shape)}, but by the config it must be [1, {length}, {width}]"
        even = torch.arange(0, width, 2, dtype=torch.float64)
        angles = torch.arange(length)[:, None] * 10000.0 ** (-even / width)
        exact = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]
        rounding = torch.finfo(table.dtype).eps if table.is_floating_point() else 0.0
        # An angle that was computed in float32 is off by about 1e-7 of itself.
        near = (table.double().reshape(length, width) - exact).abs().max() <= 1e-5 + 1e-6 * length + rounding
        return None if near else "is not the table of sines and cosines, side by side, of the original Transformer"

    return check


def causal(length: int) -> Check:
    """The check of a causal mask [length, length]: 1 for what is hidden, or for what is seen, or -inf and 0."""

    def check(mask: Tensor) -> str | None:
        if tuple(mask.shape) not in [(1,) * more + (length, length) for more in range(3)]:
            return f"is {list(mask.shape)}, but by the config it must be [{length}, {length}]"
        mask = mask.reshape(length, length)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        forms = [later.to(mask.dtype), (~later).to(mask.dtype)]
        if mask.is_floating_point():
            forms.append(torch.zeros_like(mask).masked_fill(later, -torch.inf))
        if any(torch.equal(mask, form) for form in forms):
            return None
        return "is not a causal mask (ones above the diagonal, or on and below it)"

    return check
