"""ALiBi: a bias of the attention scores that nothing of is trained.

T query length, S key length, H heads.
"""

import torch
from torch import nn


class Alibi(nn.Module):
    """ALiBi, a fixed bias slope_h * (key - query) that falls with the distance, for each head (Press et al., 2022).

    Of H heads, a power of two, the slopes are 2^(-8/H), 2^(-16/H) and so on. Another number has the slopes of
    the next lower power of two, and then every second slope of twice as many heads.
    """

    def __init__(self, config, bidirectional: bool):
        super().__init__()
        self.heads = config.num_attention_heads

    def slopes(self, device):
        """[H], float32."""
        power = 1 << (self.heads.bit_length() - 1)
        first = torch.arange(1, power + 1, device=device) * (8 / power)
        others = (2 * torch.arange(self.heads - power, device=device) + 1) * (4 / power)
        return torch.exp2(-torch.cat((first, others)))

    def forward(self, places, key_length: int):
        """places [T] -> [1, H, T, S], to be added to the attention scores."""
        keys = torch.arange(key_length, device=places.device)
        distance = keys[None, :] - places[:, None]  # [T, S]
        return (self.slopes(distance.device)[:, None, None] * distance)[None]
