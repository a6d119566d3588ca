"""Beams of an input share the keys and values of its source: read once for all of them, and held once.

B inputs, n beams of each, S source length, T target length, H heads, K key/value heads, D head size, C hidden size.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from ..model.states import states_of
from .unpadding import is_watched


class _Held:
    """A place outside of `__dict__`: exporters take every tensor in there for a part of the cache."""

    __slots__ = ("_held", "beams")
    _held: dict[str, torch.Tensor | None]
    beams: int


class CrossLayer(_Held, DynamicLayer):
    """A layer's keys and values of an encoder's states, [B * n, K, S, D], of which the n equal rows are held once.

    Whoever reads `keys` or `values` gets a row for each beam, as from the library's layer, and whoever replaces them
    ends the sharing.

    Args:
        beams: n, how many rows that stand together may be of one source; they are shared only if they are equal.
    """

    def __new__(cls, beams: int = 1):
        layer = super().__new__(cls)
        layer._held, layer.beams = {}, 1
        return layer

    def __init__(self, beams: int = 1):
        super().__init__()
        self.most_beams = beams

    def __reduce_ex__(self, protocol):
        return _rebuilt, (dict(self._held), self.beams, vars(self).copy())

    @property
    def held(self) -> tuple:
        """Keys and values as they are held, [B, K, S, D]."""
        return self._held.get("keys"), self._held.get("values")

    def share(self, keys, values, beams: int) -> None:
        """Take keys and values [B, K, S, D] for those of `beams` rows each."""
        self._held, self.beams = {"keys": keys, "values": values}, beams
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def end_sharing(self) -> None:
        """Hold a row for each beam."""
        if self.beams > 1:
            self._held = {name: each.repeat_interleave(self.beams, 0) for name, each in self._held.items()}
            self.beams = 1

    def get_seq_length(self) -> int:
        """Tokens of the source."""
        keys = self._held.get("keys")
        return 0 if not self.is_initialized or keys is None or keys.numel() == 0 else keys.shape[-2]

    def reorder_cache(self, beam_idx):
        """A beam mostly takes the place of another one of the same input, which has the same source."""
        own = torch.arange(len(beam_idx), device=beam_idx.device) // self.beams
        if self.beams == 1 or not torch.equal(torch.div(beam_idx, self.beams, rounding_mode="floor"), own):
            super().reorder_cache(beam_idx)


def _property(name: str) -> property:
    def read(layer):
        states = layer._held.get(name)
        return states if states is None or layer.beams == 1 else states.repeat_interleave(layer.beams, 0)

    def replace(layer, states):
        layer.end_sharing()
        layer._held[name] = states

    return property(read, replace)


CrossLayer.keys, CrossLayer.values = _property("keys"), _property("values")


def _rebuilt(held: dict, beams: int, state: dict) -> CrossLayer:
    layer = CrossLayer()
    layer._held, layer.beams = held, beams
    layer.__dict__.update(state)
    return layer


def share_sources(cache, beams: int) -> None:
    """Have the cross-attention of a fresh cache hold the keys and values of each source once."""
    cross = getattr(cache, "cross_attention_cache", None)
    if beams > 1 and type(cross) is DynamicCache and not cross.layers and not cross.offloading:
        cross.layers = [CrossLayer(beams) for _ in cache.self_attention_cache.layers]


def fill(attention, states, cache) -> None:
    """Keys and values of the encoder's states into a cache that has none of this layer.

    Args:
        attention: a cross-attention.
        states: the encoder's, [B * n, S, C].
        cache: a `CrossLayer` of it holds n equal rows once.
    """
    layers, index = cache.cross_attention_cache.layers, attention.layer_idx
    beams = getattr(layers[index], "most_beams", 1) if index < len(layers) else 1
    learns = torch.is_grad_enabled() and states.requires_grad
    parts = [getattr(attention, name) for name in ("k_proj", "v_proj", "k_norm")]
    is_seen = beams > 1 and any(part is not None and is_watched(part) for part in parts)
    if beams == 1 or learns or is_seen or sources(states, beams) is None:
        attention._cross_keys_values(states, cache)
        return
    layers[index].share(*attention._project_keys_values(states[::beams]), beams)
    cache.is_updated[index] = True  # last: what fails before leaves no hole


def sources(rows, beams: int):
    """One of each `beams` rows [B * n, ...] -> [B, ...]; None if not all of them are equal."""
    if len(rows) % beams:
        return None
    groups = rows.unflatten(0, (-1, beams))
    return groups[:, 0] if torch.equal(groups, groups[:, :1].expand_as(groups)) else None


def has_state(layer) -> bool:
    """Whether a cache's layer keeps a state in place of keys and values."""
    return hasattr(layer, "update_recurrent_state")


def held_by(layer) -> tuple:
    """Keys and values of a cache's layer as they are held, [B, K, S, D].

    Of one with a state, what its convolution sees [B, D, W] and the state, both None as long as it is empty.
    """
    if not has_state(layer):
        return layer.held if isinstance(layer, CrossLayer) else (layer.keys, layer.values)
    past, state = states_of(layer)
    return past, past.new_empty(len(past), 0) if state is None and past is not None else state


class SharesSources:
    """Mixed into an attention: the n beams of an input are n * T queries of one row of keys and values."""

    layer_idx: int
    is_cross_attention: bool
    q_proj: Any
    q_norm: Any
    _split_heads: Any
    _attends_by_engine: Any

    def states_of(self, hidden_states, key_value_states, position_embeddings, past_key_values, kwargs, earlier=None):
        """Queries [B, H, n * T, D], keys and values [B, K, S, D]."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            given = (hidden_states, key_value_states, position_embeddings, past_key_values, kwargs)
            return super().states_of(*given)  # type: ignore[misc]
        if not past_key_values.is_updated.get(self.layer_idx):
            fill(self, key_value_states, past_key_values)
        layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
        if isinstance(layer, CrossLayer) and not self._attends_by_engine():
            layer.end_sharing()
        query = self._split_heads(self.q_proj(hidden_states), self.q_norm)
        key, value = held_by(layer)
        if query.shape[0] != key.shape[0]:
            query = query.unflatten(0, (key.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return query, key, value
