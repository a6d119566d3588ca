"""RMS norms of many tokens, a few rows at a time, so that the float32 copies stay in the processor's cache."""

import torch

from ..normalization import RMSNorm
from .measure import is_enabled

# Elements whose float32 copies stay in a processor's cache.
_PIECE = 1 << 18


class PiecewiseRMSNorm(RMSNorm):
    """`RMSNorm`, a few rows at a time if there are many, on the CPU without gradients. The result is the same bits."""

    def forward(self, hidden_states):
        if not self._takes(hidden_states):
            return super().forward(hidden_states)
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        output = torch.empty_like(rows)
        count = max(1, _PIECE // rows.shape[-1])
        for piece, result in zip(rows.split(count), output.split(count), strict=True):
            result.copy_(super().forward(piece))
        return output.view(hidden_states.shape)

    def _takes(self, states) -> bool:
        if type(states) is not torch.Tensor or states.numel() < 4 * _PIECE or not states.is_contiguous():
            return False
        learns = torch.is_grad_enabled() and (states.requires_grad or self.weight.requires_grad)
        return not learns and states.device.type == "cpu" and states.dtype is self.weight.dtype and is_enabled()
