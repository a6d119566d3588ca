"""The parts of a decoder's step, as functions of tensors only, for the compiler: its first, some layers and its last.

A function of large layers is compiled in seconds, and once for all that are alike.

B rows, n beams of a source, S tokens with the new one, R room of a cache, E source length, H heads, K key/value heads,
D head size, C hidden size, V vocabulary.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache, LinearAttentionCacheLayerMixin

from ..model.attention import with_bias
from ..model.layer import LayerInputs
from ..model.positions import rotations_of
from ..model.states import states_of
from .few_rows import BLOCK

_AFTER_LAYERS = ("norm", "final_projection")


class _Buffers(Cache):
    """A layer's keys and values in buffers [B, K, R, D], of which the new token's slot is `slot`."""

    def __init__(self, slot, length, buffers):
        super().__init__(layers=[])
        self.slot, self.length, self.buffers = slot, length, buffers

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new token's keys and values [B, K, 1, D]; returns all tokens' keys and values, [B, K, S, D]."""
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(2, self.slot, states)
        return tuple(buffer.narrow(2, 0, self.length) for buffer in self.buffers)

    def get_mask_sizes(self, query_length, layer_idx=0):
        """Length of the keys, and where they begin."""
        return self.length, 0


@LinearAttentionCacheLayerMixin.register  # so that the library takes it for no layer with keys
class State:
    """What a layer that keeps a state holds, in buffers: the last tokens before a convolution [B, D, W], and the state.

    A step reads and writes it as the library's `LinearAttentionLayer`.
    """

    has_previous_state = True

    def __init__(self, buffers):
        self.conv_states, self.recurrent_states = buffers

    def update_conv_state(self, states):
        """Take in the new token's channels [B, D, 1]; the oldest token falls out."""
        self.conv_states.copy_(torch.cat((self.conv_states[..., 1:], states), dim=-1))

    def update_recurrent_state(self, state):
        """Take the state after the new token, which may have been written in place."""
        if state is not self.recurrent_states:
            self.recurrent_states.copy_(state)


@dataclass
class _Source:
    """A layer's keys and values of the encoder's states, [B / n, K, E, D]."""

    keys: torch.Tensor
    values: torch.Tensor


class _Caches(EncoderDecoderCache):
    """The buffers of a layer, whose index is 0, and its keys and values of the encoder's states, which are there."""

    def __init__(self, own, keys, values):
        self.self_attention_cache, self.cross_attention_cache = own, Cache(layers=[_Source(keys, values)])
        self.is_updated = {0: True}


class FirstPart(nn.Module):
    """The part before the layers, and what they all need."""

    def __init__(self, stack):
        super().__init__()
        self.config = stack.config
        self.stack = _without(stack, "layers", *_AFTER_LAYERS)

    def forward(self, input_ids, position_ids, mask, slot):
        """Embed the new tokens.

        Args:
            input_ids: int64 [B, 1], the new tokens; `position_ids` int64 [B, 1] their positions.
            mask: bool [B, S / BLOCK, BLOCK], which slots of the buffers are seen.
            slot: int64 [1], where in the buffers the new token goes.

        Returns:
            The states [B, 1, C]; layer type -> its tensors of rotary positions, empty without them; the bias of
            relative positions [1, H, S / BLOCK, BLOCK], or None.
        """
        stack, config = self.stack, self.config
        states = stack._embed(stack._embed_tokens(input_ids, None, None, None), position_ids)
        rotations = rotations_of(stack.rotary_emb, config, states, position_ids)
        rotations = {kind: tuple(each.contiguous() for each in own) for kind, own in rotations.items()}
        return states, rotations, position_bias(stack, slot, mask.shape[1])


class LayersPart(nn.Module):
    """Some layers of one type: states [B, 1, C] -> [B, 1, C]. They write the keys and values into their buffers.

    Args:
        beams: rows of a source.
    """

    def __init__(self, layers, config, beams: int = 1):
        super().__init__()
        self.config, self.layers, self.beams = config, nn.ModuleList(layers), beams

    def forward(self, states, mask, slot, rotations, bias, buffers, source_mask, sources):
        """Run the layers.

        Args:
            mask: bool [B, S / BLOCK, BLOCK], which slots of the buffers are seen; `slot` int64 [1], the new token's.
            rotations: of `FirstPart`.
            bias: [1, H, S / BLOCK, BLOCK] or None.
            buffers: keys and values [B, K, R, D] of one layer after the other; or what its convolution sees [B, D, W]
                and its state, of a layer that keeps one.
            source_mask: bool [B / n, 1, 1, E], or None without an encoder.
            sources: keys and values [B / n, K, E, D] of the encoder's states, of one layer after the other, or none.
        """
        length, mask = mask.shape[1] * BLOCK, mask.flatten(1)[:, None, None, :]
        if bias is not None:
            mask = with_bias(self.config, mask, bias.flatten(2)[:, :, None].to(states.dtype))
        if source_mask is not None:
            # By these two lines the compiler knows how few queries a source has.
            torch._check(states.shape[0] == self.beams * source_mask.shape[0])
            source_mask, *sources = (
                each.narrow(0, 0, states.shape[0] // self.beams) for each in (source_mask, *sources)
            )
            source_mask = source_mask.expand(-1, -1, self.beams, -1)
        layer_inputs = LayerInputs({}, {}, slot, source_mask)
        for index, layer in enumerate(self.layers):
            own = slice(2 * index, 2 * index + 2)
            cache: Cache = _Buffers(slot, length, buffers[own])
            if keeps_state(layer):
                cache, mask = Cache(layers=[State(buffers[own])]), None  # the new token is not padding
            if source_mask is not None:
                cache = _Caches(cache, *sources[own])
            states = _cut(states) if index else states
            source = None if source_mask is None else states  # any tensor: its keys and values are cached
            given = {"position_embeddings": rotations.get(layer.layer_type), "layer_inputs": layer_inputs}
            states = layer.forward(states, source, mask, **given, past_key_values=cache)
        return states


def keeps_state(layer) -> bool:
    """Whether a layer keeps a state in place of keys and values."""
    return hasattr(layer.self_attn, "state_bytes")


def has_state(layer) -> bool:
    """Whether a cache's layer keeps a state in place of keys and values."""
    return hasattr(layer, "update_recurrent_state")


def held_by(layer) -> tuple:
    """Keys and values of a cache's layer, [B, K, S, D].

    Of one with a state, what its convolution sees [B, D, W] and the state, both None as long as it is empty.
    """
    if not has_state(layer):
        return layer.keys, layer.values
    past, state = states_of(layer)
    return past, past.new_empty(len(past), 0) if state is None and past is not None else state


def _cut(states):
    """The same states, by an operator that the compiler does not fuse, so that equal parts share their code."""
    return states[None].cumsum(0)[0]


class LastPart(nn.Module):
    """The part after the layers: states [B, 1, C] -> logits [B, 1, V]."""

    def __init__(self, model, stack):
        super().__init__()
        self.stack = _without(stack, *(name for name in stack._modules if name not in (*_AFTER_LAYERS, "dropout")))
        self.head = _without(model, model.base_model_prefix)

    def forward(self, states):
        """What the stack does after its layers, and the head."""
        return self.head.logits_of(self.stack.after_layers(states))


def position_bias(stack, slot, blocks):
    """The new token's bias of relative positions [1, H, blocks, BLOCK], or None."""
    bias = stack.relative_bias(slot, blocks * BLOCK) if stack.has_shared_bias else None
    return None if bias is None else bias[:, :, 0].unflatten(2, (-1, BLOCK)).contiguous()


def _without(module, *names):
    """The module without some of its parts, sharing all others."""
    rest = copy.copy(module)
    vars(rest)["_modules"] = {name: part for name, part in module._modules.items() if name not in names}
    return rest
