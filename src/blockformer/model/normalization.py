"""Normalisation of the last dimension: LayerNorm and RMSNorm, with the factors that a config names."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .axes import BLOCKS, Part, axis, flag


@dataclass(eq=False, repr=False)
class NormFields(Part):
    """The fields of every norm."""

    norm_type: str = axis("rms_norm", ("layer_norm", "rms_norm"), "norm", "which norm, throughout the model")
    norm_eps: float = axis(1e-6, "a positive number", "norm", "added to the variance before the square root")
    norm_weight: str = axis(
        "plain", ("plain", "zero_centered", "none"), "norm", "factor of a norm: its weight, 1 + weight, or no factor"
    )
    norm_bias: bool | None = flag(None, "norm", "bias of a layer norm; None means yes. An RMS norm has none")

    def fill_defaults(self):
        """A layer norm has a bias unless told otherwise."""
        if self.norm_bias is None:
            self.norm_bias = self.norm_type == "layer_norm" and self.norm_weight != "none"

    def check(self):
        """An RMS norm has no bias, and neither has a norm without a factor."""
        if self.norm_type == "rms_norm" and self.norm_bias:
            raise ValueError("norm_bias=True needs norm_type='layer_norm': an RMS norm has no bias.")
        if self.norm_weight == "none" and self.norm_bias:
            raise ValueError("norm_weight='none' needs norm_bias=False: leave one of the two out.")


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang and Sennrich, 2019), computed in float32: x / sqrt(mean(x^2) + eps) * weight.

    Shapes: [..., size] -> [..., size], in the weight's dtype: a residual stream may be wider than the weights.
    """

    def forward(self, hidden_states):
        weight = self.weight
        if hidden_states.dtype is weight.dtype:
            return torch.rms_norm(hidden_states, weight.shape, weight, self.eps)
        return weight * F.rms_norm(hidden_states.float(), weight.shape, eps=self.eps).to(weight.dtype)

    def extra_repr(self):
        return f"{self.weight.numel()}, eps={self.eps}"


class ScaledNorm(nn.Module):
    """Either norm with its own factor, in float32: 1 + weight (Gemma, Nemotron), or one for each head (Cohere).

    Shapes: [..., *size] -> [..., *size], normalised over the last dimension, in the weight's dtype.
    """

    def __init__(self, config, size: tuple[int, ...]):
        super().__init__()
        self.normalize = F.rms_norm if config.norm_type == "rms_norm" else F.layer_norm
        self.eps, self.offset = config.norm_eps, int(config.norm_weight == "zero_centered")
        self.weight = nn.Parameter(torch.full(size, 1.0 - self.offset))
        self.bias = nn.Parameter(torch.zeros(size)) if config.norm_bias and len(size) == 1 else None

    def init_tensors(self) -> None:
        """A fresh norm has the factor 1."""
        init.constant_(self.weight, 1 - self.offset)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, hidden_states):
        states = self.normalize(hidden_states.float(), hidden_states.shape[-1:], eps=self.eps)
        states = states * (self.offset + self.weight.float())
        return (states if self.bias is None else states + self.bias).to(self.weight.dtype)


def make_norm(config, *size: int) -> nn.Module:
    """The config's norm over a last dimension; of more dimensions in `size` each has its own factors."""
    if (own := BLOCKS["norm_type"].get(config.norm_type)) is not None:
        return own(config, *size)
    if config.norm_weight == "zero_centered" or len(size) > 1:
        return ScaledNorm(config, size)
    affine = config.norm_weight == "plain"
    if config.norm_type == "rms_norm":
        return RMSNorm(size[0], config.norm_eps) if affine else nn.RMSNorm(size, config.norm_eps, affine)
    return nn.LayerNorm(size[0], eps=config.norm_eps, elementwise_affine=affine, bias=config.norm_bias)
