"""ReZero (Bachlechner et al., 2020), "ReZero is All You Need: Fast Convergence at Large Depth"."""

import torch
from torch import nn

from .blocks import block
from .layer import Layer


@block("residual", "rezero")
class ReZeroLayer(Layer):
    """x + alpha * f(x) for each sub-layer f with its norms; alpha is a trained number, 0 at the start."""

    def __init__(self, config, layer_idx, is_causal, has_cross_attention):
        super().__init__(config, layer_idx, is_causal, has_cross_attention)
        for name in ("self_attn", "cross_attn", "mlp") if has_cross_attention else ("self_attn", "mlp"):
            self.register_parameter(f"{name}_alpha", nn.Parameter(torch.zeros(())))

    def residual_step(self, sublayer, hidden_states, change):
        return super().residual_step(sublayer, hidden_states, getattr(self, f"{sublayer}_alpha") * change)
