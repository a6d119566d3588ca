"""A dense network and experts in one layer, each between its own norms (Gemma team, 2026).

C hidden size, E experts, k of them for a token.
"""

import torch
from torch import nn
from transformers import initialization as init

from .experts import Router, SparseFeedForward
from .feed_forward import FeedForward
from .normalization import make_norm

_NORMS = ("dense_pre_norm", "dense_output_norm", "sparse_pre_norm", "sparse_output_norm", "router_norm")


class ScaledRouter(Router):
    """A router whose logits are divided by sqrt(C), and which multiplies each expert's weight by a learned number."""

    def __init__(self, config):
        super().__init__(config)
        self.expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def init_tensors(self) -> None:
        """A fresh router has the factor 1 for each expert."""
        super().init_tensors()
        init.ones_(self.expert_scale)

    def forward(self, tokens):
        logits, weights, experts = super().forward(tokens * tokens.shape[-1] ** -0.5)
        return logits, weights * self.expert_scale[experts], experts


class DenseAndSparse(SparseFeedForward):
    """norm(dense(norm(x))) + norm(sparse(norm(x))), and its own norm for the router. [B, T, C] -> [B, T, C].

    x is the residual stream itself, so the layer's only norm of this sub-layer is the one after it.
    """

    norm_placement = "output"

    def __init__(self, config, inner: int):
        super().__init__(config, inner)
        self.gate, self.dense = ScaledRouter(config), FeedForward(config, inner)
        for name in _NORMS:
            self.add_module(name, make_norm(config, config.hidden_size))

    def forward(self, hidden_states):
        dense = self.dense_output_norm(self.dense(self.dense_pre_norm(hidden_states)))
        sparse = super().forward(self.sparse_pre_norm(hidden_states), self.router_norm(hidden_states))
        return dense + self.sparse_output_norm(sparse)
