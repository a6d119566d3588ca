"""Experts in a compiled step: a token reads the weights of the experts that it passes through, and no others.

N tokens, k experts of a token, O outputs, I inputs of a product.
"""

import torch

from ..model.experts import Experts
from .few_rows import computed_once
from .measure import is_own_trace


class TracedExperts(Experts):
    """`Experts` of a model with compiled steps. A plain module becomes one by changing its class."""

    def forward(self, tokens, experts, weights):
        if not is_own_trace():
            return super().forward(tokens, experts, weights)
        gate_up = _products(tokens[:, None], self.gate_up_proj, self.gate_up_proj_bias, experts)
        output = _products(self._apply_gate(gate_up), self.down_proj, self.down_proj_bias, experts)
        return (output * weights[..., None]).sum(1).to(tokens.dtype)


def _products(states, matrices, biases, experts) -> torch.Tensor:
    """States [N, 1 or k, I] times the matrices [E, O, I] of experts int64 [N, k] -> float32 [N, k, O]."""
    # As a loop whose index is looked up the compiler copies no matrix.
    products = (matrices[experts].float() * computed_once(states)[:, :, None]).sum(-1)
    return products if biases is None else products + biases[experts].float()
