"""RMS norm of a few tokens in half precision with fewer operators, and of queries and keys together."""

import torch
from torch.nn import functional as F

from ..normalization import RMSNorm
from .linear import HALVES

# Numbers up to which calling operators takes longer than what they do.
_FEW = 1 << 12


class QuickRMSNorm(RMSNorm):
    """`RMSNorm` of a prepared model. One becomes the other by changing its class.

    Few numbers of half precision are taken as the layer norm of [x, -x], whose mean is 0 and whose variance is the mean
    square of x: PyTorch has a kernel for a layer norm, while its RMS norm is ten operators.
    """

    def forward(self, hidden_states):
        weight, size = self.weight, hidden_states.shape[-1]
        if not _are_few(hidden_states) or hidden_states.dtype is not weight.dtype:
            return super().forward(hidden_states)
        both = torch.cat((hidden_states, -hidden_states), dim=-1)
        return F.layer_norm(both, (2 * size,), torch.cat((weight, weight)), eps=self.eps)[..., :size]


def can_be_quick_norm(norm) -> bool:
    """Whether its states can be such: a float32 norm as a layer norm gains nothing."""
    return norm.weight.dtype in HALVES


def normed(hidden_states, eps: float):
    """`RMSNorm` without a weight: states [..., size] -> [..., size], computed in float32."""
    size = hidden_states.shape[-1]
    if not _are_few(hidden_states):
        return F.rms_norm(hidden_states, (size,), eps=eps)
    return F.layer_norm(torch.cat((hidden_states, -hidden_states), dim=-1), (2 * size,), eps=eps)[..., :size]


def _are_few(hidden_states) -> bool:
    is_on_cpu = hidden_states.device.type == "cpu"  # a GPU has a kernel for an RMS norm
    return is_on_cpu and hidden_states.dtype in HALVES and hidden_states.numel() <= _FEW
