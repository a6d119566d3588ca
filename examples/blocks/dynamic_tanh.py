"""Dynamic Tanh (Zhu et al., 2025), "Transformers without Normalization"."""

import torch
from torch import nn

from .axes import axis
from .blocks import block


@block("norm_type", "dynamic_tanh", dynamic_tanh_alpha=axis(0.5, "a positive number", "norm", "alpha at the start"))
class DynamicTanh(nn.Module):
    """weight * tanh(alpha * x) + bias: squashes what a norm would scale. [..., size] -> [..., size]."""

    def __init__(self, config, size):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(config.dynamic_tanh_alpha))
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states):
        return self.weight * torch.tanh(self.alpha * hidden_states) + self.bias
