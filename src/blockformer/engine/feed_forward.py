"""The first product of a feed-forward network and its activation as one operator of oneDNN."""

import functools

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..feed_forward import FeedForward
from . import onednn
from .linear import QuickLinear, is_bare
from .measure import is_own_trace, random_matrix
from .packed import PackedLinear


class FusedFeedForward(FeedForward):
    """`FeedForward` of a prepared model. One becomes the other by changing its class."""

    def _plain_inner(self, hidden_states):
        layer, activation = self.up_proj, _activations().get(type(self.act_fn))
        if activation is not None and is_bare(layer) and is_bare(self.act_fn):
            if type(layer) is PackedLinear:
                inner = layer.packed.activated(hidden_states, layer.bias, activation)
                if inner is not None:
                    return inner
            elif type(layer) is QuickLinear and is_own_trace() and layer.takes_onednn(hidden_states):
                return onednn.product(hidden_states, layer.weight, layer.bias, activation)
        return super()._plain_inner(hidden_states)


@functools.cache
@torch.no_grad()
def _activations() -> dict[type, onednn.Activation]:
    """The classes of activations that oneDNN can end a product in here, tried with a small matrix each."""
    known = {"relu": ("relu", ""), "silu": ("swish", ""), "swish": ("swish", "")}
    known |= {"gelu": ("gelu", "none"), "gelu_pytorch_tanh": ("gelu", "tanh")}
    found = {}
    with torch.autocast("cpu", enabled=False):
        states, weight = random_matrix(4, 8), random_matrix(16, 8)
        for name, activation in known.items():
            try:
                expected = ACT2FN[name](nn.functional.linear(states, weight))
                if torch.allclose(onednn.product(states, weight, None, activation), expected, rtol=1e-5, atol=1e-5):
                    found[type(ACT2FN[name])] = activation
            except (AttributeError, RuntimeError, NotImplementedError):
                pass
    return found
