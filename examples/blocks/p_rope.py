"""p-RoPE (Barbero et al., 2024), "Round and Round We Go! What makes Rotary Positional Encodings useful?"."""

import torch

from .axes import axis
from .blocks import block
from .positions import ComputedPositions


@block(
    "position_type", "p_rope", p_rope_share=axis(0.75, "a probability from 0 to 1", "positions", "share that rotates")
)
class PartialRotation(ComputedPositions):
    """Rotary positions without their lowest frequencies: those channels see content only.

    position_ids [B, T] -> cosines and signed sines for `rotate`, each [B, 1, T, D].
    """

    gives = "rotations"

    def __init__(self, config):
        super().__init__()
        if config.head_dim % 2:
            raise ValueError(f"head_dim ({config.head_dim}) must be even with p_rope: it rotates pairs of channels.")
        self.head_dim, self.share = config.head_dim, config.p_rope_share
        self._set_frequencies(torch.get_default_device())

    def compute_frequencies(self):
        pairs = torch.arange(0, self.head_dim, 2, device="cpu") / self.head_dim
        return torch.where(pairs < self.share, 10_000.0**-pairs, 0.0)

    def forward(self, hidden_states, position_ids):
        frequencies = torch.cat((-self.inv_freq, self.inv_freq)).to(position_ids.device)
        angles = position_ids[:, None, :, None].float() * frequencies
        return angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype)
