"""The position-wise feed-forward network, plain and gated."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .joint import Joint
from .kernels import linear
from .quantized_linear import make_linear


class FeedForward(nn.Module):
    """Plain: down(act(up(x))), as in "Attention Is All You Need". Gated: down(act(gate(x)) * up(x)) (Shazeer, 2020).

    With `chunk_size_feed_forward` the tokens pass in chunks of that length, so that the inner states of a few are held
    at a time. Shapes: [B, T, hidden_size] -> [B, T, hidden_size].
    """

    def __init__(self, config):
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = make_linear(config, width, inner, bias) if config.gated_mlp else None
        self.up_proj = make_linear(config, width, inner, bias)
        self.down_proj = make_linear(config, inner, width, bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.dropout = config.activation_dropout
        self.chunk_size = config.chunk_size_feed_forward
        self.joint: Joint | None = None  # of the layers that `joinable` gives; set by `prepare_for_inference`

    def forward(self, hidden_states):
        if self.chunk_size == 0:
            return self._transform(hidden_states)
        chunks = hidden_states.split(self.chunk_size, dim=1)
        return torch.cat([self._transform(chunk) for chunk in chunks], dim=1)

    def _transform(self, hidden_states):
        if self.gate_proj is None:
            inner = self.act_fn(linear(self.up_proj, hidden_states))
        else:
            gate, up = self._gate_and_up(hidden_states)
            inner = self.act_fn(gate) * up
        if self.training:
            inner = F.dropout(inner, self.dropout)
        return linear(self.down_proj, self._fitting(inner))

    def joinable(self) -> tuple[nn.Module, ...]:
        """The layers that read the same states and may be one product."""
        return () if self.gate_proj is None else (self.gate_proj, self.up_proj)

    def _gate_and_up(self, hidden_states):
        if self.joint is not None:
            product = self.joint.product(hidden_states, self.joinable())
            if product is not None:
                return product.split(self.joint.sizes, dim=-1)
        return [linear(layer, hidden_states) for layer in self.joinable()]

    def _fitting(self, inner):
        """In the dtype of the down projection, which may be kept in float32; quantized weights see to it themselves."""
        weight = getattr(self.down_proj, "weight", None)
        fits = weight is None or not weight.is_floating_point() or weight.dtype == inner.dtype
        return inner if fits or torch.is_autocast_enabled(inner.device.type) else inner.to(weight.dtype)
