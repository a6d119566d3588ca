"""One layer: attention and feed-forward, each inside a residual step with its norm."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import Attention
from .feed_forward import FeedForward
from .normalization import make_norm


class Layer(GradientCheckpointingLayer):
    """Self-attention, optionally cross-attention, feed-forward.

    Each norm belongs to one sub-layer and keeps its Llama name in both placements: `input_layernorm` to
    self-attention, `post_attention_layernorm` to the feed-forward network. With "pre" it comes before its sub-layer,
    with "post" after it.
    """

    def __init__(self, config, layer_idx: int, is_causal: bool, has_cross_attention: bool):
        super().__init__()
        self.pre_norm = config.norm_placement == "pre"
        self.dropout = config.hidden_dropout
        self.self_attn = Attention(config, layer_idx, is_causal)
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.has_cross_attention = has_cross_attention
        if has_cross_attention:
            self.cross_attn = Attention(config, layer_idx, is_causal, is_cross_attention=True)
            self.cross_attn_layernorm = make_norm(config, config.hidden_size)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)

    def _residual(self, hidden_states, norm: nn.Module, sublayer):
        """x + f(norm(x)) or norm(x + f(x)): the one place where the placement of the norm matters."""
        change = sublayer(norm(hidden_states) if self.pre_norm else hidden_states)
        if self.training:
            change = F.dropout(change, self.dropout)
        hidden_states = _hold_finite(hidden_states + change)
        return hidden_states if self.pre_norm else norm(hidden_states)

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
        packing=None,
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
                packing=packing,
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

        hidden_states = self._residual(hidden_states, self.input_layernorm, attend)
        if self.has_cross_attention and encoder_hidden_states is not None:
            hidden_states = self._residual(hidden_states, self.cross_attn_layernorm, attend_to_encoder)
        return self._residual(hidden_states, self.post_attention_layernorm, self.mlp)


def _hold_finite(states):
    """In float16, infinities become the largest numbers, less a margin: an overflow does not end in NaN (T5)."""
    if states.dtype != torch.float16:
        return states
    largest = torch.finfo(torch.float16).max - 1000
    return torch.nan_to_num(states, nan=torch.nan, posinf=largest, neginf=-largest)
