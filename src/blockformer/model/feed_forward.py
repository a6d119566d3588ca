"""The position-wise feed-forward network, plain and gated."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import ACT2FN

from .axes import FLAG, SHARED, Part, axis, flag


def make_activation(name: str) -> nn.Module:
    """The activation of that name in transformers' ACT2FN; the tanh form of GELU as one operator in place of eight."""
    act = ACT2FN["gelu_pytorch_tanh" if name in ("gelu_new", "gelu_fast", "gelu_accurate") else name]
    return act.to(torch.get_default_dtype())  # xIELU begins with bfloat16 numbers


@dataclass(eq=False, repr=False)
class FeedForwardFields(Part):
    """The fields of the feed-forward network."""

    intermediate_size: int = axis(1536, "a positive integer", "size", "inner width of the feed-forward network")
    mlp_type: str | None = axis(None, (), "feed-forward", "a network from outside; None: the usual one")
    gated_mlp: bool = flag(True, "feed-forward", "down(act(gate(x)) * up(x)) instead of down(act(up(x)))")
    hidden_act: str = axis("silu", tuple(ACT2FN), "feed-forward", "activation, a name in transformers' ACT2FN")
    mlp_bias: bool | str = axis(False, (*FLAG, "down"), "feed-forward", "bias of the projections, or of the last only")
    float32_down_proj: bool = flag(False, "feed-forward", "down projections stay float32 in a float16 model")
    activation_dropout: float = axis(0.0, "a probability from 0 to 1", "training", "dropout of feed-forward states")
    chunk_size_feed_forward: int = axis(0, "an integer of 0 or more", "use", "tokens at a time; 0 means all")

    def check(self):
        """Down projections in float32 widen the states; a norm's factor is what narrows them again."""
        if self.float32_down_proj and self.norm_weight == "none":
            raise ValueError("float32_down_proj=True needs norms with a factor: leave norm_weight='none' out.")

    def inner_width_of(self, is_causal: bool, layer_idx: int | None = None) -> int:
        """The inner width of a layer's network, by default the largest one, of a stack."""
        return self.intermediate_size

    def share_out(self, plan, has_cross_attention):
        """Each process has some of the inner states."""
        plan |= {"layers.*.mlp.act_fn": SHARED} if self.hidden_act == "xielu" else {}  # it has trained numbers
        if self.gated_mlp:
            plan["layers.*.mlp.gate_proj"] = "colwise"
        plan |= {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


class FeedForward(nn.Module):
    """Plain: down(act(up(x))), as in "Attention Is All You Need". Gated: down(act(gate(x)) * up(x)) (Shazeer, 2020).

    With `chunk_size_feed_forward` the tokens pass in chunks of that length, so that the inner states of a few are held
    at a time. Shapes: [B, T, hidden_size] -> [B, T, hidden_size]; the states between have the width `inner`.
    """

    def __init__(self, config, inner: int):
        super().__init__()
        width, bias = config.hidden_size, config.mlp_bias is True
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bool(config.mlp_bias))
        self.act_fn = make_activation(config.hidden_act)
        self.dropout = nn.Dropout(config.activation_dropout)
        self.float32_down_proj = config.float32_down_proj
        self.chunk_size = config.chunk_size_feed_forward

    def forward(self, hidden_states):
        if 0 < self.chunk_size < hidden_states.shape[1]:
            return torch.cat([self.forward(chunk) for chunk in hidden_states.split(self.chunk_size, dim=1)], dim=1)
        if self.gate_proj is None:
            inner = self._plain_inner(hidden_states)
        else:
            # vLLM makes one matmul of these two calls where they stand in this source, each once.
            inner = self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        inner = self.dropout(inner) if self.dropout.training else inner
        return self.down_proj(self._fitting(inner) if self.float32_down_proj else inner)

    def _plain_inner(self, hidden_states):
        return self.act_fn(self.up_proj(hidden_states))

    def _fitting(self, inner):
        """In the dtype of the down projection; quantized weights, which may be a method, see to it themselves."""
        weight = getattr(self.down_proj, "weight", None)
        fits = not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dtype == inner.dtype
        return inner if fits or torch.is_autocast_enabled(inner.device.type) else inner.to(weight.dtype)
