"""Merged attention of a decoder (Zhang et al., 2025, T5Gemma 2): one softmax over its own tokens and the encoder's.

Also windows of an encoder that count every token that they show, as a decoder's do.

B batch, T target length, P cached and new target tokens, S source length, H heads, K key/value heads, D head size.
"""

import torch
from transformers.masking_utils import create_bidirectional_mask

from .attention import Attention, refuse_backends
from .compat import OutputRecorder
from .layer import Layer
from .stack import Stack


class MergedAttention(Attention):
    """Attention of a decoder to the keys and values of its tokens and, after them, of the encoder's.

    The same matrices and norms make both. Only queries and keys of the decoder's tokens rotate.
    """

    projects_states = False

    def forward(self, hidden_states, attention_mask=None, key_value_states=None, **kwargs):
        """As usual, with a mask [B, 1, T, P + S] of both; gives the probabilities of both apart."""
        given = {"attention_mask": attention_mask, "key_value_states": key_value_states}
        output, probabilities = super().forward(hidden_states, **given, **kwargs)
        if probabilities is None or key_value_states is None:
            return output, probabilities, None
        length = key_value_states.shape[1]
        return output, probabilities[..., :-length], probabilities[..., -length:]

    def states_of(self, hidden_states, key_value_states, position_embeddings, past_key_values, kwargs, earlier=None):
        """Queries [B, H, T, D], keys and values [B, K, P + S, D]. The two caches hold their parts separately."""
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        query, key, value = self._split_states(q, k, v, position_embeddings)
        own = self._with_past(key, value, past_key_values, kwargs)
        if key_value_states is None:
            return query, *own
        source = self._cross_keys_values(key_value_states, past_key_values)
        return query, *(torch.cat(pair, dim=2) for pair in zip(own, source, strict=True))

    def _check_backend(self):
        super()._check_backend()
        refuse_backends(self.config, ("flash", "flex", "vllm", "paged"), "decoder with merged_attention")


class MergedLayer(Layer):
    """A decoder's layer with merged attention in place of self- and cross-attention."""

    attention_class = MergedAttention

    def forward(
        self,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        distances=None,
        token_input=None,
        position_embeddings=None,
        layer_inputs=None,
        **kwargs,
    ):
        """As in `Layer`."""
        if layer_inputs.cross_head_mask is not None:
            raise ValueError(
                "cross_attn_head_mask needs cross-attention, which merged_attention has not: leave it out."
            )
        kwargs |= {"layer_inputs": layer_inputs, "key_value_states": encoder_hidden_states}
        given = (hidden_states, None, attention_mask, distances, token_input, position_embeddings)
        return super().forward(*given, **kwargs)


class MergedStack(Stack):
    """A decoder of such layers."""

    layer_class = MergedLayer
    _can_record_outputs = Stack._can_record_outputs | {"cross_attentions": OutputRecorder(MergedAttention, index=2)}

    def __init__(self, config, is_causal: bool, has_cross_attention: bool = False):
        super().__init__(config, is_causal)
        self.has_cross_attention = has_cross_attention
        self._no_split_modules = (MergedLayer.__name__,)

    def plan(self, inputs, masks=None):
        """As usual, with the masks of both texts side by side."""
        plan, source = super().plan(inputs, masks), inputs.source[0]
        if source is None:
            return plan
        length, past = inputs.places.shape[0], inputs.past_key_values
        merged = {}
        for kind, mask in plan.masks.items():
            layer = self.config.decoder_layer_types.index(kind) if kind in self.config.decoder_layer_types else 0
            keys = length if past is None else past.get_mask_sizes(length, layer)[0]
            merged[kind] = merged_mask(mask, plan.encoder_mask, (length, keys, source.shape[1]), source.device)
        return plan._replace(masks=merged, encoder_mask=None)


def merged_mask(own, source, lengths, device):
    """The masks [1 or B, 1, T, P] and [1 or B, 1, T, S] side by side, or None where all is seen.

    None is a mask that hides nothing, except later tokens: without it several queries are the first tokens, and
    further keys are the empty room of a static cache. `lengths` are T, P and S.
    """
    queries, keys, others = lengths
    if own is None and source is None and queries == 1:
        return None
    like = next((mask for mask in (own, source) if mask is not None), None)
    if own is None:
        own = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - 1 if queries == 1 else 0)[
            None, None
        ]
        own = own if like is None or like.dtype == torch.bool else _additive(own, like.dtype)
    if source is None:
        shape = (1, 1, queries, others)
        source = own.new_ones(shape) if own.dtype == torch.bool else own.new_zeros(shape)
    rows = max(own.shape[0], source.shape[0])
    return torch.cat([mask.expand(rows, -1, queries, -1) for mask in (own, source)], dim=-1)


def _additive(visible, dtype):
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


class CenteredStack(Stack):
    """An encoder whose window of w tokens is centered: (w - 1) // 2 tokens before a token, itself, w // 2 after it."""

    def plain_masks(self, inputs):
        """As usual, with such a window."""
        if isinstance(inputs.attention_mask, dict):
            return inputs.attention_mask
        refuse_backends(self.config, "flash", "centered_window of an encoder")
        window, masks = self.config.sliding_window, {}
        given = {"inputs_embeds": inputs.hidden_states, "attention_mask": inputs.attention_mask}

        def is_near(row, head, query, key):
            return (query - key <= (window - 1) // 2) & (key - query <= window // 2)

        kinds = {"full_attention": None, "sliding_attention": is_near}
        for kind in sorted(set(self.config.layer_types)):
            masks[kind] = create_bidirectional_mask(config=self.config, **given, and_mask_function=kinds[kind])
        return masks
