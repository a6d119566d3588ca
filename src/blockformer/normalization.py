"""Normalisation of the last dimension: LayerNorm (bias optional) and RMSNorm."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .axes import Part, axis, flag


@dataclass(eq=False, repr=False)
class NormFields(Part):
    """The fields of every norm."""

    norm_type: str = axis("rms_norm", ("layer_norm", "rms_norm"), "norm", "which norm, throughout the model")
    norm_eps: float = axis(1e-6, "a positive number", "norm", "added to the variance before the square root")
    norm_bias: bool | None = flag(None, "norm", "bias of a layer norm; None means yes. An RMS norm has none")

    def fill_defaults(self):
        """A layer norm has a bias unless told otherwise."""
        super().fill_defaults()
        if self.norm_bias is None:
            self.norm_bias = self.norm_type == "layer_norm"

    def check(self):
        """An RMS norm has no bias."""
        super().check()
        if self.norm_type == "rms_norm" and self.norm_bias:
            raise ValueError("norm_bias=True needs norm_type='layer_norm': an RMS norm has no bias.")


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
        return rms_norm(hidden_states, self.weight, self.eps)

    def extra_repr(self):
        return f"{self.weight.numel()}, eps={self.eps}"


def rms_norm(hidden_states, weight, eps: float):
    """`RMSNorm`'s definition. hidden_states [..., size], a weight that fits [..., size] -> [..., size]."""
    size = hidden_states.shape[-1:]
    if hidden_states.dtype is weight.dtype is torch.float32 and weight.dim() == 1:
        return F.rms_norm(hidden_states, size, weight, eps)
    return weight * F.rms_norm(hidden_states.float(), size, eps=eps).to(weight.dtype)


def make_norm(config, size: int) -> nn.Module:
    """The config's norm over a last dimension of `size`."""
    if config.norm_type == "rms_norm":
        return RMSNorm(size, config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)
