"""The key/value cache that grows in place.

The library's dynamic cache copies all past keys and values at every token (`torch.cat`). A `GrowingLayer` writes into a
buffer with room to spare, then into one half as large again: it copies a constant number per token on average.
"""

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from .measure import is_enabled

_GROWTH, _LEAST_ROOM = 1.5, 64  # by hand: of a buffer's tokens, and tokens
# Elements of the keys up to which concatenating them takes no longer than looking after a buffer
# (benchmarks/thresholds.py).
_FEW = 1 << 17


class _Buffers:
    """A place outside of `__dict__`: exporters take every tensor in there for a part of the cache."""

    __slots__ = ("_buffers", "_shown")
    _buffers: dict[str, torch.Tensor]
    _shown: int  # how many tokens of the buffers views have shown


class GrowingLayer(_Buffers, DynamicLayer):
    """One layer's keys and values [B, K, S, D], views of buffers [B, K, capacity, D].

    Whatever replaces the views (offloading, selecting rows) stays correct: an update looks whether they still are the
    head of the buffer, and moves to a fresh one if not, or after the cache was cropped or reordered: what a view has
    shown is never written over. The library concatenates where gradients are recorded (a query that learns needs the
    keys that it met, whether those learn or not), where fast paths are off, and as long as the keys are few.
    """

    def __new__(cls, *args, **kwargs):
        layer = super().__new__(cls)
        layer._buffers, layer._shown = {}, 0
        return layer

    def __getstate__(self):
        return vars(self)  # a copy has buffers of its own once it grows: two that append to one would overwrite it

    def update(self, key_states, value_states, *args, **kwargs):
        """Append keys and values [B, K, T, D]; returns all of them, [B, K, S, D]."""
        if not self._buffers and self.get_seq_length() and self.keys.numel() < _FEW:  # type: ignore[has-type]
            return super().update(key_states, value_states, *args, **kwargs)
        if torch.is_grad_enabled() or not is_enabled() or not self._can_append(key_states, value_states):
            self._buffers.clear()
            return super().update(key_states, value_states, *args, **kwargs)
        if self.get_seq_length() == 0:
            # A first call's states are kept as they are: many callers never make a second one.
            self.keys, self.values = key_states, value_states
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        else:
            if self.keys.shape[-2] < self._shown:  # cropped: somebody may hold views of what would be written over
                self._buffers.clear()
            self.keys = self._append("keys", self.keys, key_states)
            self.values = self._append("values", self.values, value_states)
            self._shown = self.keys.shape[-2]
        return self.keys, self.values

    def _can_append(self, key_states, value_states) -> bool:
        if self.get_seq_length() == 0:
            return True
        held, new = (self.keys, self.values), (key_states, value_states)
        return all((old.dtype, old.device) == (own.dtype, own.device) for old, own in zip(held, new, strict=True))

    def _append(self, name, held, states):
        past, length = held.shape[-2], held.shape[-2] + states.shape[-2]
        buffer = self._with_room(name, held, length)
        buffer[..., past:length, :] = states
        return buffer[..., :length, :]

    def _with_room(self, name, held, length):
        """The buffer that holds these states and has room for `length` tokens in all."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[-2] < length or not _is_head_of(held, buffer) or not _is_writable(buffer):
            buffer = _buffer(held, max(length + _LEAST_ROOM, int(length * _GROWTH)))
            buffer[..., : held.shape[-2], :] = held
            self._buffers[name] = buffer
        return buffer

    def reorder_cache(self, beam_idx):
        """Keep the beams `beam_idx` [B], in other buffers: somebody may hold views of the present ones."""
        super().reorder_cache(beam_idx)
        if self._buffers:
            self.keys, self.values = (self._moved(name, getattr(self, name)) for name in ("keys", "values"))

    def _moved(self, name, held):
        buffer = self._buffers[name] = _buffer(held, max(self._buffers[name].shape[-2], held.shape[-2]))
        view = buffer[..., : held.shape[-2], :]
        return view.copy_(held)

    def reset(self):
        """Forget everything and give the memory back."""
        self._buffers.clear()
        self.keys = self.values = None
        self._shown, self.is_initialized = 0, False


def _buffer(states, capacity: int):
    """Room for so many tokens of states [..., T, D], which may be written to in every mode."""
    with torch.inference_mode(False):
        return states.new_empty((*states.shape[:-2], capacity, states.shape[-1]))


def _is_head_of(view, buffer) -> bool:
    """Whether `view` is `buffer[..., :n, :]`: the same memory, batch and layout."""
    return (
        view.data_ptr() == buffer.data_ptr()
        and view.stride() == buffer.stride()
        and view.shape[:-2] == buffer.shape[:-2]
        and view.shape[-1] == buffer.shape[-1]
    )


def _is_writable(buffer) -> bool:
    """A buffer made in inference mode cannot be written outside of it."""
    return torch.is_inference_mode_enabled() or not buffer.is_inference()


def grow_in_place(cache):
    """Swap the plain dynamic layers of a fresh cache for growing ones; other layers and caches stay as they are."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if type(own) is DynamicCache and not own.offloading:
        if own.layer_class_to_replicate is DynamicLayer:
            own.layer_class_to_replicate = GrowingLayer
        own.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in own.layers]
    return cache
