"""Squared ReLU (So et al., 2021), "Primer: Searching for Efficient Transformers for Language Modeling"."""

from torch import nn

from .blocks import block


@block("mlp_type", "squared_relu")
class SquaredReLU(nn.Module):
    """down(relu(up(x))^2): [B, T, hidden_size] -> [B, T, hidden_size]."""

    tensor_parallel_plan = {"up_proj": "colwise", "down_proj": "rowwise"}

    def __init__(self, config, inner):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        return self.down_proj(self.up_proj(hidden_states).relu().square())
