"""One layer: attention and feed-forward, each inside a residual step with its norms."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import Attention
from .axes import Part, axis, flag
from .feed_forward import FeedForward
from .normalization import make_norm

# Where a sub-layer f has norms: post(x + output(f(pre(x)))).
NORM_SLOTS = {"pre": ("pre",), "post": ("post",), "output": ("output",), "pre_output": ("pre", "output")}


@dataclass(eq=False, repr=False)
class LayerFields(Part):
    """How a layer puts its sub-layers together, and what stands before and after all layers."""

    norm_placement: str = axis(
        "pre",
        tuple(NORM_SLOTS),
        "norm",
        "x + f(norm(x)), norm(x + f(x)), x + norm(f(x)), or x + norm2(f(norm(x)))",
    )
    final_norm: bool | None = flag(
        None, "norm", "a norm after the last layer; None means unless norm_placement is post"
    )
    hidden_dropout: float = axis(
        0.0, "a probability from 0 to 1", "training", "after the embeddings and after each sub-layer"
    )

    def settle(self):
        """A layer that ends in a norm needs no final one."""
        super().settle()
        if self.final_norm is None:
            self.final_norm = self.norm_placement != "post"

    def check(self):
        """A norm never follows a norm."""
        super().check()
        if self.norm_placement == "post" and self.final_norm:
            raise ValueError(
                "final_norm=True with norm_placement='post': each layer already ends in a norm; set final_norm=False."
            )


class Layer(GradientCheckpointingLayer):
    """Self-attention, optionally cross-attention, feed-forward.

    Each sub-layer has a norm in each slot that `norm_placement` names: `self_attn_pre_norm`, `mlp_post_norm` and so on.
    """

    def __init__(self, config, layer_idx: int, is_causal: bool, has_cross_attention: bool):
        super().__init__()
        self.dropout = config.hidden_dropout
        self.self_attn = Attention(config, layer_idx, is_causal)
        self.has_cross_attention = has_cross_attention
        if has_cross_attention:
            self.cross_attn = Attention(config, layer_idx, is_causal, is_cross_attention=True)
        self.mlp = FeedForward(config)
        for sublayer in ("self_attn", "cross_attn", "mlp") if has_cross_attention else ("self_attn", "mlp"):
            for slot in NORM_SLOTS[config.norm_placement]:
                self.add_module(f"{sublayer}_{slot}_norm", make_norm(config, config.hidden_size))

    def _residual(self, hidden_states, name: str, sublayer):
        """post(x + output(f(pre(x)))): the one place where the placement of a norm matters."""
        change = sublayer(self._norm(name, "pre", hidden_states))
        change = self._norm(name, "output", change)
        if self.training:
            change = F.dropout(change, self.dropout)
        return self._norm(name, "post", _hold_finite(hidden_states + change))

    def _norm(self, sublayer: str, slot: str, states):
        norm = self._modules.get(f"{sublayer}_{slot}_norm")
        return states if norm is None else norm(states)

    def forward(
        self,
        hidden_states,
        encoder_hidden_states=None,
        position_bias=None,
        attention_mask=None,
        encoder_attention_mask=None,
        position_embeddings=None,
        query_positions=None,
        past_key_values=None,
        head_mask=None,
        unpadding=None,
        **kwargs,
    ):
        """hidden_states [B, T, C] -> [B, T, C]; the other arguments are those of `Attention.forward`.

        What gradients flow through comes first: reentrant checkpointing follows positional arguments only.
        """

        def attend(states):
            return self.self_attn(
                states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                position_bias=position_bias,
                query_positions=query_positions,
                past_key_values=past_key_values,
                head_mask=head_mask,
                unpadding=unpadding,
                **kwargs,
            )[0]

        def attend_to_encoder(states):
            return self.cross_attn(
                states,
                attention_mask=encoder_attention_mask,
                key_value_states=encoder_hidden_states,
                past_key_values=past_key_values,
                **kwargs,
            )[0]

        hidden_states = self._residual(hidden_states, "self_attn", attend)
        if self.has_cross_attention and encoder_hidden_states is not None:
            hidden_states = self._residual(hidden_states, "cross_attn", attend_to_encoder)
        return self._residual(hidden_states, "mlp", self.mlp)


def _hold_finite(states):
    """In float16, infinities become the largest numbers, less a margin: an overflow does not end in NaN (T5)."""
    if states.dtype != torch.float16:
        return states
    largest = torch.finfo(torch.float16).max - 1000
    return torch.nan_to_num(states, nan=torch.nan, posinf=largest, neginf=-largest)
