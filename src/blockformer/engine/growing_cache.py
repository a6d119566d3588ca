"""The key/value cache that grows in place.

The library's dynamic cache copies all past keys and values at every token (`torch.cat`). A `GrowingLayer` writes into a
buffer with room to spare, then into one half as large again: it copies a constant number per token on average.
"""

import functools
import threading

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from .measure import is_enabled

_GROWTH, _LEAST_ROOM = 1.5, 64  # by hand: of a buffer's tokens, and tokens
# Elements of the keys up to which concatenating them takes no longer than looking after a buffer
# (benchmarks/thresholds.py).
_FEW = 1 << 17


class _Buffers:
    """A place outside of `__dict__`: exporters take every tensor in there for a part of the cache."""

    __slots__ = ("_buffers", "_shared", "_shown")
    _buffers: dict[str, torch.Tensor]
    _shown: int  # how many tokens of the buffers views have shown
    _shared: tuple[torch.Tensor, int, list | None] | None  # how many tokens rows share, of how many, writes until then


class GrowingLayer(_Buffers, DynamicLayer):
    """One layer's keys and values [B, K, S, D], views of buffers [B, K, capacity, D].

    Whatever replaces the views (beam reordering, cropping, offloading) stays correct: an update looks whether they
    still are the head of the buffer, and moves to a fresh one if not, or if somebody else holds views of what it would
    write over (a branch kept before the cache was cropped). The library concatenates where gradients are recorded (a
    query that learns needs the keys that it met, whether those learn or not), where fast paths are off, and as long as
    the keys are few.

    Beams that come from the same one hold the same tokens: a layer on the CPU knows how many any two rows share, and
    copies only what comes behind. It forgets this as soon as it holds anything else than the head of its buffers.
    """

    def __new__(cls, *args, **kwargs):
        layer = super().__new__(cls)
        layer._buffers, layer._shared, layer._shown = {}, None, 0
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
            shared = self._take_shared()
            self._leave_what_others_hold()
            self.keys = self._append("keys", self.keys, key_states)
            self.values = self._append("values", self.values, value_states)
            self._shown = self.keys.shape[-2]
            self._keep_shared(shared)
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
            capacity = max(length + _LEAST_ROOM, int(length * _GROWTH))
            buffer = _buffer(held, capacity)
            buffer[..., : held.shape[-2], :] = held
            self._buffers[name] = buffer
        return buffer

    def _leave_what_others_hold(self) -> None:
        """Start again in fresh buffers if views of others show the places to be written."""
        if self.keys.shape[-2] < self._shown and any(map(_is_read_by_others, self._buffers.values())):
            self._buffers.clear()

    def reorder_cache(self, beam_idx):
        """Keep the beams `beam_idx` [B]."""
        length = self.get_seq_length()
        if length == 0:
            return
        if not self._can_reorder(beam_idx):
            self._buffers.clear()
            super().reorder_cache(beam_idx)
            return
        shared = self._take_shared()
        first, shared = _reordered(_none_shared(len(beam_idx)) if shared is None else shared, beam_idx, length)
        for states in (self.keys, self.values) if first < length else ():
            rest = states[..., first:, :]
            rest.copy_(rest.index_select(0, beam_idx))
        self._keep_shared(shared)

    def _can_reorder(self, beam_idx) -> bool:
        """Whether the rows can be written over: nobody else reads this memory."""
        if {beam_idx.device.type, self.keys.device.type} != {"cpu"} or len(beam_idx) != len(self.keys):
            return False
        buffers = self._buffers.values()
        return self._is_in_buffers() and all(_is_writable(each) and not _is_read_by_others(each) for each in buffers)

    def _is_in_buffers(self) -> bool:
        """Whether keys and values are the heads of the buffers, and not what somebody has put in their place."""
        held = [(self._buffers.get(name), getattr(self, name)) for name in ("keys", "values")]
        return all(buffer is not None and _is_head_of(states, buffer) for buffer, states in held)

    def _take_shared(self):
        """How many first tokens any two rows share, [B, B], as `_keep_shared` left it; None if that is not known."""
        shared, self._shared = self._shared, None
        is_known = shared is not None and shared[1:] == (self.get_seq_length(), self._writes())
        return shared[0] if is_known and self._is_in_buffers() else None  # type: ignore[index]

    def _keep_shared(self, shared) -> None:
        self._shared = None if shared is None else (shared, self.get_seq_length(), self._writes())

    def _writes(self) -> list:
        return [_writes_to(self._buffers[name]) if name in self._buffers else None for name in ("keys", "values")]

    def reset(self):
        """Forget everything and give the memory back."""
        self._buffers.clear()
        self._shared = self.keys = self.values = None
        self._shown, self.is_initialized = 0, False


def _buffer(states, capacity: int):
    """Room for so many tokens of states [..., T, D], which may be written to in every mode."""
    with torch.inference_mode(False):
        return states.new_empty((*states.shape[:-2], capacity, states.shape[-1]))


@functools.cache
def _none_shared(rows: int):
    return torch.zeros(rows, rows, dtype=torch.long, device="cpu")


_last = threading.local()


def _reordered(shared, beam_idx, length: int) -> tuple:
    """From which token on rows change when they become the rows `beam_idx` [B], and what rows share then.

    Args:
        shared: how many first tokens, of `length`, any two rows are known to share, int64 [B, B].

    Returns:
        The first token that may change, and the like of `shared`, [B, B].
    """
    # The layers of a cache ask the same, one after the other. Beams are compared by value: a caller may write others
    # into the same tensor.
    last, beams = getattr(_last, "asked", None), beam_idx.tolist()
    if last is None or last[0] is not shared or last[1:] != (beams, length):
        whole = shared.clone().fill_diagonal_(length)
        first = int(whole.gather(1, beam_idx[:, None].long()).min())
        _last.asked = (shared, beams, length)
        _last.answer = first, whole.index_select(0, beam_idx).index_select(1, beam_idx)
    return _last.answer


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


def _is_read_by_others(buffer) -> bool:
    """Whether more tensors than a buffer and one view have its memory; yes if that is not to be known."""
    return (uses := _uses(buffer)) is None or uses > _uses_of_two()


def _uses(buffer) -> int | None:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(buffer.untyped_storage()._cdata)


@functools.cache
def _uses_of_two() -> int:
    buffer = torch.empty(1, device="cpu")
    view = buffer[:]  # noqa: F841 - held while they are counted
    return _uses(buffer) or 0


def grow_in_place(cache):
    """Swap the plain dynamic layers of a fresh cache for growing ones; other layers and caches stay as they are."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if type(own) is DynamicCache and not own.offloading:
        if own.layer_class_to_replicate is DynamicLayer:
            own.layer_class_to_replicate = GrowingLayer
        own.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in own.layers]
    return cache


def _writes_to(tensor) -> int | None:
    """How often a tensor was written to; None if it is one of inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version
