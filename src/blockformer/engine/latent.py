"""Latent attention of one more token on the CPU: the cached vectors are compared with as they are.

A head's key is W c, made from the latent vector c of a token. A query q meets it as q · W c = (W^T q) · c, and a sum of
values, sum_s p_s V c_s, is V (sum_s p_s c_s). So W and V are multiplied once by what one token has, not by all cached
vectors: DeepSeek-V2 (2024), section 2.1.2.

B batch, S key length, H heads, D head size, R rotated channels of a head, V value size, L latent size, C hidden size.
"""

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..model.latent_attention import LatentAttention
from .attention import is_in_use
from .linear import QuickLinear
from .measure import is_enabled
from .watched import is_bare, is_transformed


class PreparedLatentAttention(LatentAttention):
    """`LatentAttention` of a prepared model. One becomes the other by changing its class."""

    def with_heads(self, query, latents, shared):
        """For one token, queries [B, H, 1, R + L], keys [B, 1, S, R + L] and values [B, 1, S, L]."""
        if not self._takes(query, query.shape[2]):
            return super().with_heads(query, latents, shared)
        rotated = shared.shape[-1]
        matrices = self.k_proj.weight.unflatten(0, (query.shape[1], -1))  # [H, D - R, L]
        query = torch.cat((query[..., :rotated], query[..., rotated:] @ matrices), dim=-1)
        return query, torch.cat((shared, latents), dim=-1), latents

    def before_output(self, output, hidden_states):
        """[B, 1, H * L], weighted sums of latent vectors -> [B, 1, H * V]."""
        if not self._takes(hidden_states, hidden_states.shape[1]):
            return output
        heads = len(self.heads)
        matrices = self.v_proj.weight.unflatten(0, (heads, -1))  # [H, V, L]
        return (output.view(-1, heads, 1, output.shape[-1] // heads) @ matrices.mT).reshape(len(output), 1, -1)

    def _takes(self, states, length: int) -> bool:
        """Whether this is one token of each row, and two plain products may be made in another order."""
        if length != 1 or states.device.type != "cpu" or not is_enabled() or not is_in_use(self.config):
            return False
        if torch.is_autocast_enabled("cpu") or is_transformed() or _has_any_global_hook():
            return False
        layers = (self.k_proj, self.v_proj)
        return all(type(layer) in (nn.Linear, QuickLinear) and is_bare(layer) for layer in layers)


def layers_read_as_weights(model: nn.Module) -> set[nn.Module]:
    """The linear layers whose weights it reads: these are to stay plain."""
    parts = [module for module in model.modules() if isinstance(module, LatentAttention)]
    return {layer for part in parts for layer in (part.k_proj, part.v_proj)}
