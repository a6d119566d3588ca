"""The key/value cache that grows in place.

The library's dynamic cache copies all past keys and values at every token (`torch.cat`). A `GrowingLayer` writes into a
buffer with room to spare, then into one half as large again: it copies a constant number per token on average.
"""

import functools

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation import GenerationMixin

_GROWTH = 1.5
_LEAST_ROOM = 64


class _Buffers:
    """A place outside of `__dict__`: exporters take every tensor in there for a part of the cache."""

    __slots__ = ("_buffers",)


class GrowingLayer(_Buffers, DynamicLayer):
    """One layer's keys and values [B, K, S, D], views of buffers [B, K, capacity, D].

    Whatever replaces the views (beam reordering, cropping, offloading) stays correct: an update looks whether they
    still are the head of the buffer, and moves to a fresh one if not. Where an in-place write is not allowed (autograd
    needs the past values, a graph is being traced), the library's own concatenation is used.
    """

    def __new__(cls, *args, **kwargs):
        layer = super().__new__(cls)
        layer._buffers = {}
        return layer

    def update(self, key_states, value_states, *args, **kwargs):
        """Append keys and values [B, K, T, D]; returns all of them, [B, K, S, D]."""
        in_place = not (torch.compiler.is_compiling() or (torch.is_grad_enabled() and key_states.requires_grad))
        if not in_place or not self._can_append(key_states):
            self._buffers.clear()
            return super().update(key_states, value_states, *args, **kwargs)
        if self.get_seq_length() == 0:
            # A first call's states are kept as they are: many callers never make a second one.
            self.keys, self.values = key_states, value_states
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        else:
            self.keys = self._append("keys", self.keys, key_states)
            self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def _can_append(self, states) -> bool:
        if self.get_seq_length() == 0:
            return True
        return not self.keys.requires_grad and (self.keys.dtype, self.keys.device) == (states.dtype, states.device)

    def _append(self, name, held, states):
        past, length = held.shape[-2], held.shape[-2] + states.shape[-2]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[-2] < length or not _is_head_of(held, buffer) or not _is_writable(buffer):
            capacity = max(length + _LEAST_ROOM, int(length * _GROWTH))
            buffer = held.new_empty((*held.shape[:-2], capacity, held.shape[-1]))
            buffer[..., :past, :] = held
            self._buffers[name] = buffer
        buffer[..., past:length, :] = states
        return buffer[..., :length, :]

    def reorder_cache(self, beam_idx):
        """Keep the beams `beam_idx` [B], together with the room behind them."""
        length = self.get_seq_length()
        if length == 0:
            return
        for name in ("keys", "values"):
            held, buffer = getattr(self, name), self._buffers.get(name)
            if buffer is None or not _is_head_of(held, buffer):
                self._buffers.pop(name, None)
                setattr(self, name, held.index_select(0, beam_idx.to(held.device)))
            else:
                self._buffers[name] = buffer.index_select(0, beam_idx.to(buffer.device))
                setattr(self, name, self._buffers[name][..., :length, :])

    def reset(self):
        """Forget everything and give the memory back."""
        self._buffers.clear()
        self.keys = self.values = None
        self.is_initialized = False


class CrossLayer(DynamicLayer):
    """Keys and values of an encoder's states [B, K, S, D], one row for all beams of an input."""

    def reorder_cache(self, beam_idx):
        """Nothing to do: a beam only ever takes the place of another one of the same input."""


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
    if isinstance(cache, EncoderDecoderCache):
        _swap_layers(cache.self_attention_cache, GrowingLayer)
        _swap_layers(cache.cross_attention_cache, CrossLayer)
    else:
        _swap_layers(cache, GrowingLayer)
    return cache


def _swap_layers(cache, layer_class) -> None:
    if type(cache) is DynamicCache and not cache.offloading:
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = layer_class
        cache.layers = [layer_class() if type(layer) is DynamicLayer else layer for layer in cache.layers]


def new_cache(config, for_cross_attention: bool = False):
    """An empty growing cache for a model of this config; with `for_cross_attention` one that also holds cross keys."""
    cache = DynamicCache(config=config)
    return grow_in_place(EncoderDecoderCache(cache, DynamicCache()) if for_cross_attention else cache)


class GrowingGenerationMixin(GenerationMixin):
    """`generate()` with the growing cache as its default."""

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        outputs = super().generate(*args, **kwargs)
        cache = getattr(outputs, "past_key_values", None)
        if isinstance(cache, EncoderDecoderCache):
            # While it ran, the beams of an input shared a row. The caller gets a row a beam, as from any model.
            beams = cache.self_attention_cache.layers[0].keys.shape[0]
            for layer in cache.cross_attention_cache.layers:
                if isinstance(layer, DynamicLayer) and layer.keys.shape[0] < beams:
                    layer.batch_repeat_interleave(beams // layer.keys.shape[0])
        return outputs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        supplied = model_kwargs.get("past_key_values")
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if supplied is None:
            if isinstance(cache, EncoderDecoderCache):
                # The library sizes it for every beam; ours holds one row for all beams of an input.
                cache.cross_attention_cache = DynamicCache()
            grow_in_place(cache)
        return result
