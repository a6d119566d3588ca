"""Normalisation of the last dimension: LayerNorm (bias optional) and RMSNorm."""

import torch
from torch import nn

from .kernels import can_norm_in_pieces, norm_in_pieces


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich, 2019), computed in float32: x / sqrt(mean(x^2) + eps) * weight.

    Shapes: [..., size] -> [..., size], in the weight's dtype: a residual stream kept wider than the weights is narrowed
    here.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states):
        if can_norm_in_pieces(hidden_states, self.weight):
            return norm_in_pieces(self._norm, hidden_states)
        return self._norm(hidden_states)

    def _norm(self, hidden_states):
        return rms_norm(hidden_states, self.weight, self.eps)

    def extra_repr(self):
        return f"{self.weight.numel()}, eps={self.eps}"


def rms_norm(hidden_states, weight, eps: float):
    """`RMSNorm`'s definition. hidden_states [..., size], a weight that fits [..., size] -> [..., size]."""
    states = hidden_states.float()
    states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
    return weight * states.to(weight.dtype)


def make_norm(config, size: int) -> nn.Module:
    """The config's norm over a last dimension of `size`."""
    if config.norm_type == "rms_norm":
        return RMSNorm(size, config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)


# Where a sub-layer f has norms: post(x + output(f(pre(x)))).
NORM_SLOTS = {"pre": ("pre",), "post": ("post",), "output": ("output",), "pre_output": ("pre", "output")}


def norm_slots(config) -> tuple[str, ...]:
    """The slots of each sub-layer that hold a norm: "pre", "output", "post"."""
    return NORM_SLOTS[config.norm_placement]
