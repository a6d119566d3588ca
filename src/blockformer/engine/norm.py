"""RMS norms of many tokens a few rows at a time, so that float32 copies stay in the cache."""

import torch

from ..normalization import RMSNorm
from .measure import is_enabled

# Elements whose float32 copies stay in a processor's cache, and how many of them are worth cutting up.
_PIECE = 1 << 18
_MANY = {torch.float32: 16 * _PIECE, torch.bfloat16: 4 * _PIECE, torch.float16: 4 * _PIECE}


class PiecewiseRMSNorm(RMSNorm):
    """`RMSNorm`, a few rows at a time if there are many, without gradients.

    The result is the same bits.
    """

    def forward(self, hidden_states):
        if type(hidden_states) is not torch.Tensor or hidden_states.device.type != "cpu" or not is_enabled():
            return super().forward(hidden_states)
        if hidden_states.dtype is not self.weight.dtype:
            return super().forward(hidden_states)
        if self._cuts(hidden_states):
            rows = hidden_states.view(-1, hidden_states.shape[-1])
            output = torch.empty_like(rows)
            count = max(1, _PIECE // rows.shape[-1])
            for piece, result in zip(rows.split(count), output.split(count), strict=True):
                result.copy_(super().forward(piece))
            return output.view(hidden_states.shape)
        return super().forward(hidden_states)

    def _cuts(self, states) -> bool:
        if states.numel() < _MANY.get(states.dtype, 0) or not states.is_contiguous():
            return False
        return not (torch.is_grad_enabled() and (states.requires_grad or self.weight.requires_grad))
