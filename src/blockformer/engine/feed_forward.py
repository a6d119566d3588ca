"""The first product of a feed-forward network and its activation as one operator of oneDNN."""

import functools

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..model.feed_forward import FeedForward
from . import onednn
from .linear import is_bare
from .measure import random_matrix
from .packed import PackedLinear


class FusedFeedForward(FeedForward):
    """`FeedForward` of a prepared model. One becomes the other by changing its class."""

    def _plain_inner(self, hidden_states):
        layer, activation = self.up_proj, _ACTIVATIONS.get(type(self.act_fn))
        inner = None
        is_packed = type(layer) is PackedLinear and activation is not None
        if is_packed and is_bare(layer) and is_bare(self.act_fn):
            inner = layer.activated(hidden_states, activation)
        return super()._plain_inner(hidden_states) if inner is None else inner


# The activations that oneDNN has, by their classes.
_ACTIVATIONS: dict[type, onednn.Activation] = {
    type(ACT2FN["relu"]): ("relu", ""),
    type(ACT2FN["silu"]): ("swish", ""),
    type(ACT2FN["swish"]): ("swish", ""),
    type(ACT2FN["gelu"]): ("gelu", "none"),
    type(ACT2FN["gelu_pytorch_tanh"]): ("gelu", "tanh"),
}


def can_be_fused(network: nn.Module) -> bool:
    """Whether oneDNN can end a product in this network's activation here."""
    if not hasattr(network, "up_proj") or getattr(network, "gate_proj", None) is not None:
        return False  # without an `up_proj`, some tool has put its layers together
    return _is_right(type(network.act_fn))  # type: ignore[arg-type]  # classes are hashable


@functools.cache
@torch.no_grad()
def _is_right(kind: type) -> bool:
    """Whether oneDNN has an activation and computes it, tried with a small matrix."""
    if kind not in _ACTIVATIONS:
        return False
    states, weight = random_matrix(4, 8), random_matrix(16, 8)
    with torch.autocast("cpu", enabled=False):
        try:
            found = onednn.product(states, weight, None, _ACTIVATIONS[kind])
        except (AttributeError, RuntimeError, NotImplementedError):
            return False
        return torch.allclose(found, kind()(nn.functional.linear(states, weight)), rtol=1e-5, atol=1e-5)
