"""Sinusoidal positions.

B batch, T query length, C hidden size.
"""

import math

import torch

from .positions import ComputedPositions


class SinusoidalPositions(ComputedPositions):
    """PE(pos, 2i) = sin(pos / 10000^(2i/C)), PE(pos, 2i+1) = cos(the same) (Vaswani et al., 2017, section 3.5).

    "sinusoidal" has sine and cosine of a frequency side by side, as in the paper; others all sines, then all cosines.
    "sinusoidal_inclusive" ends at the frequency 1/10000 itself. Any position can be computed, however far.
    position_ids [B, T] -> [B, T, C].

    An angle of many radians rounds coarsely in float32. It is counted in turns, of which whole ones are dropped, and a
    frequency is a sum of parts of `_BITS` bits, whose products with a position are exact up to 2^14.
    """

    _BITS = 10

    def __init__(self, config):
        super().__init__()
        self.hidden_size = config.embedding_size
        self.halves, self.offset = config.position_type != "sinusoidal", config.position_offset
        self.steps = self.hidden_size - 2 * (config.position_type == "sinusoidal_inclusive")
        self._set_frequencies(torch.get_default_device())

    def compute_frequencies(self):
        """Turns per token, in three parts: [3, C/2], float32."""
        even = torch.arange(0, self.hidden_size, 2, dtype=torch.float64, device="cpu")
        rest = torch.exp(even * (-math.log(10000.0) / self.steps)) / (2 * math.pi)
        unit = 2.0 ** (torch.floor(torch.log2(rest)) + 1 - self._BITS)
        parts = []
        for _ in range(2):
            parts.append((rest / unit).floor() * unit)
            rest, unit = rest - parts[-1], unit * 2.0**-self._BITS
        return torch.stack([*parts, rest]).float()

    def forward(self, position_ids):
        positions = (position_ids + self.offset)[..., None, None].float()
        angles = 2 * math.pi * (positions * self.inv_freq).frac().sum(-2)  # [B, T, C/2]
        pair = (angles.sin(), angles.cos())
        waves = torch.cat(pair, dim=-1) if self.halves else torch.stack(pair, dim=-1).flatten(-2)  # [B, T, C]
        return waves[..., : self.hidden_size] * (position_ids[..., None] >= 0)  # padding has none before the first
