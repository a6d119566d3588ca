"""The parts of a decoder's step, as functions of tensors alone, for the compiler: its first, a layer's and its last.

A function for each layer is compiled in seconds, and once for all layers that are alike.

B rows, n beams of a source, S tokens with the new one, R room of a cache, E source length, H heads, K key/value heads,
D head size, C hidden size, V vocabulary.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..layer import Batch
from ..positions import rotations_of
from .few_rows import BLOCK

WRITTEN = 2 * BLOCK  # places in a buffer that a step writes: the new token's, and zeros


class _Buffers(Cache):
    """A layer's keys and values in buffers [B, K, R, D], of which the new token's place is `place`."""

    def __init__(self, place, length, buffers=()):
        super().__init__(layers=[])
        self.place, self.length, self.buffers = place, length, buffers

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new token's keys and values [B, K, 1, D]; returns those of all, [B, K, S, D].

        Behind it come zeros, since keys and values are read in whole blocks, and at least two of them.
        """
        places = self.place + torch.arange(WRITTEN)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(2, places, F.pad(states, (0, 0, 0, WRITTEN - 1)))
        return tuple(buffer.narrow(2, 0, self.length) for buffer in self.buffers)

    def get_mask_sizes(self, query_length, layer_idx=0):
        """Length of the keys, and where they begin."""
        return self.length, 0


@dataclass
class _Source:
    """A layer's keys and values of the encoder's states, [B / n, K, E, D]."""

    keys: torch.Tensor
    values: torch.Tensor


class _Caches(EncoderDecoderCache):
    """A layer's buffers, and its keys and values of the encoder's states, which are there already."""

    def __init__(self, own, keys, values, layer_idx):
        self.self_attention_cache, self.cross_attention_cache = own, Cache(layers=[])
        self.cross_attention_cache.layers = {layer_idx: _Source(keys, values)}
        self.is_updated = {layer_idx: True}


class FirstPart(nn.Module):
    """What comes before the layers, and what they all need."""

    def __init__(self, stack):
        super().__init__()
        self.config = stack.config
        self.stack = _without(stack, "layers", "norm")

    def forward(self, input_ids, position_ids, mask, place):
        """Embed the new tokens.

        Args:
            input_ids: int64 [B, 1], the new tokens; `position_ids` int64 [B, 1] their positions.
            mask: bool [B, S / BLOCK, BLOCK], which tokens are seen.
            place: int64 [1], where in the buffers the new token goes: S - 1.

        Returns:
            The states [B, 1, C]; what rotary positions turn by, two for each of the layer types in order, or none; the
            mask of a sliding window, like `mask`, or none; the bias of relative positions [1, H, S / BLOCK, BLOCK], or
            none.
        """
        stack, config = self.stack, self.config
        states = stack._embed(stack._embed_tokens(input_ids, None, None, None), position_ids)
        rotations = rotations_of(stack.rotary_emb, config, states, position_ids)
        turns = [turn.contiguous() for kind in sorted(rotations) for turn in rotations[kind]]
        windows = []
        if config.sliding_window is not None:
            near = torch.arange(mask.shape[1] * BLOCK).view(-1, BLOCK) > place - config.sliding_window
            windows = [mask & near]
        bias = position_bias(stack, place, mask.shape[1])
        return states, turns, windows, [] if bias is None else [bias]


class LayerPart(nn.Module):
    """One layer: states [B, 1, C] -> [B, 1, C]. It writes the new token's keys and values into their buffers."""

    def __init__(self, layer, config):
        super().__init__()
        self.config, self.layer = config, layer

    def forward(self, states, mask, place, turns, bias, keys, values, source_mask, source_keys, source_values):
        """Run the layer.

        Args:
            mask: bool [B, S / BLOCK, BLOCK]; `place` int64 [1], of the new token.
            turns: what rotary positions turn by, or none; `bias` [1, H, S / BLOCK, BLOCK] or None.
            keys, values: buffers [B, K, R, D].
            source_mask: bool [B / n, 1, 1, E], and `source_keys`, `source_values` [B / n, K, E, D]; None without an
                encoder.
        """
        layer = self.layer
        mask = mask.flatten(1)[:, None, None, :]
        bias = None if bias is None else bias.flatten(2)[:, :, None]
        cache: Cache = _Buffers(place, mask.shape[-1], (keys, values))
        if source_mask is not None:
            beams = states.shape[0] // source_mask.shape[0]
            source_mask = source_mask.expand(-1, -1, beams, -1)
            cache = _Caches(cache, source_keys, source_values, layer.layer_idx)
        rotations = {layer.layer_type: tuple(turns)} if turns else {}
        batch = Batch({layer.layer_type: mask}, rotations, place, source_mask)
        source = None if source_mask is None else states  # any tensor: its keys and values are cached
        return layer.forward(states, source, bias, batch=batch, past_key_values=cache)


class LastPart(nn.Module):
    """What comes after the layers: states [B, 1, C] -> logits [B, 1, V]."""

    def __init__(self, model, norm):
        super().__init__()
        self.config, self.norm = model.config, norm
        self.head = _without(model, model.base_model_prefix)

    def forward(self, states):
        """Norm and head."""
        return self.head.logits_of(states if self.norm is None else self.norm(states))


def position_bias(stack, place, blocks):
    """The new token's bias of relative positions [1, H, blocks, BLOCK], or None."""
    bias = stack._position_bias(place, _Buffers(place, blocks * BLOCK))
    return None if bias is None else bias[:, :, 0].unflatten(2, (-1, BLOCK)).contiguous()


def _without(module, *names):
    """The module without some of its parts, sharing all others."""
    rest = copy.copy(module)
    vars(rest)["_modules"] = {name: part for name, part in module._modules.items() if name not in names}
    return rest
