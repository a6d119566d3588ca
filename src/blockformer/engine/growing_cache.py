"""The key/value cache that grows in place.

The library's dynamic cache copies all past keys and values at every token (`torch.cat`). A `GrowingLayer` writes into a
buffer with room to spare, then into one half as large again: it copies a constant number per token on average.
"""

import functools

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from ..modeling_decoder import BlockformerDecoderForCausalLM
from ..modeling_encoder_decoder import BlockformerEncoderDecoderForConditionalGeneration
from ..stack import Stack

_GROWTH = 1.5
_LEAST_ROOM = 64
# Elements of the keys up to which concatenating them takes no longer than looking after a buffer.
_FEW = 1 << 15


class _Buffers:
    """A place outside of `__dict__`: exporters take every tensor in there for a part of the cache."""

    __slots__ = ("_buffers",)


class GrowingLayer(_Buffers, DynamicLayer):
    """One layer's keys and values [B, K, S, D], views of buffers [B, K, capacity, D].

    Whatever replaces the views (beam reordering, cropping, offloading) stays correct: an update looks whether they
    still are the head of the buffer, and moves to a fresh one if not. Where an in-place write is not allowed (autograd
    needs the past values, a graph is being traced), and as long as the keys are few, the library concatenates.
    """

    def __new__(cls, *args, **kwargs):
        layer = super().__new__(cls)
        layer._buffers = {}
        return layer

    def update(self, key_states, value_states, *args, **kwargs):
        """Append keys and values [B, K, T, D]; returns all of them, [B, K, S, D]."""
        if not self._buffers and self.get_seq_length() and self.keys.numel() < _FEW:  # type: ignore[has-type]
            return super().update(key_states, value_states, *args, **kwargs)
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
        buffer = self._with_room(name, held, length)
        buffer[..., past:length, :] = states
        return buffer[..., :length, :]

    def _with_room(self, name, held, length):
        """The buffer that holds these states and has room for `length` tokens in all."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[-2] < length or not _is_head_of(held, buffer) or not _is_writable(buffer):
            capacity = max(length + _LEAST_ROOM, int(length * _GROWTH))
            buffer = held.new_empty((*held.shape[:-2], capacity, held.shape[-1]))
            buffer[..., : held.shape[-2], :] = held
            self._buffers[name] = buffer
        return buffer

    def reserve(self, tokens: int):
        """The contiguous buffers [B, K, capacity, D] of keys and values, with room for so many more tokens.

        Whoever writes into them calls `advance` afterwards.
        """
        length = self.keys.shape[-2] + tokens
        return self._with_room("keys", self.keys, length), self._with_room("values", self.values, length)

    def advance(self, tokens: int) -> None:
        """Take the next tokens of the buffers, which somebody has written, for held ones."""
        length = self.keys.shape[-2] + tokens
        self.keys, self.values = (self._buffers[name][..., :length, :] for name in ("keys", "values"))

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
                room = self._other_buffer(name, buffer, len(beam_idx))
                torch.index_select(held, 0, beam_idx.to(buffer.device), out=room[..., :length, :])
                self._buffers |= {name: room, f"former {name}": buffer}
                setattr(self, name, room[..., :length, :])

    def _other_buffer(self, name, buffer, rows: int):
        """A buffer like this one, of so many rows: the former one if nobody reads it any more, or else a fresh one.

        The pages of a fresh one are made when they are first written to, which may take longer than all else in a step.
        """
        former, shape = self._buffers.pop(f"former {name}", None), (rows, *buffer.shape[1:])
        if former is not None and former.shape == shape and _is_writable(former) and _uses(former) == _uses_of_one():
            return former
        return buffer.new_empty(shape)

    def reset(self):
        """Forget everything and give the memory back."""
        self._buffers.clear()
        self.keys = self.values = None
        self.is_initialized = False


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


def _uses(buffer) -> int:
    """How many tensors have this memory; 0 if that is not to be known."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else count(buffer.untyped_storage()._cdata)


@functools.cache
def _uses_of_one() -> int:
    """What `_uses` says of memory with one tensor; -1 if it says nothing."""
    return _uses(torch.empty(1, device="cpu")) or -1


def grow_in_place(cache, and_windows: bool = False):
    """Swap the plain dynamic layers of a fresh cache for growing ones; other layers and caches stay as they are.

    Args:
        and_windows: swap those that drop what a sliding window has passed, too. The mask alone is the window then.
    """
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if type(own) is DynamicCache and not own.offloading:
        if own.layer_class_to_replicate is DynamicLayer:
            own.layer_class_to_replicate = GrowingLayer
        swapped = (DynamicLayer, DynamicSlidingWindowLayer) if and_windows else (DynamicLayer,)
        own.layers = [GrowingLayer() if type(layer) in swapped else layer for layer in own.layers]
    return cache


def _asking_less(masks_of):
    """`Stack._masks` that knows without the library that one token [B, 1, C] sees all that a dynamic cache holds."""

    @functools.wraps(masks_of)
    def step_masks(self, hidden_states, attention_mask, past_key_values, position_ids):
        own = getattr(past_key_values, "self_attention_cache", past_key_values)
        is_step = attention_mask is None and hidden_states.shape[1] == 1 and type(own) is DynamicCache
        if is_step and self.config.sliding_window is None and self.config._attn_implementation == "sdpa":
            return {"full_attention": None}
        return masks_of(self, hidden_states, attention_mask, past_key_values, position_ids)

    return step_masks


def plug_in() -> None:
    """Have this package's models make growing caches, by themselves and in `generate`, and few masks over them."""
    Stack._masks = _asking_less(Stack._masks)  # type: ignore[method-assign]
    new_cache = Stack.new_cache

    @functools.wraps(new_cache)
    def new_growing_cache(self, for_cross_attention: bool = False):
        return grow_in_place(new_cache(self, for_cross_attention))

    Stack.new_cache = new_growing_cache  # type: ignore[method-assign]
    for generating in (BlockformerDecoderForCausalLM, BlockformerEncoderDecoderForConditionalGeneration):
        growing = _growing(generating._prepare_cache_for_generation)
        generating._prepare_cache_for_generation = growing  # type: ignore[method-assign]


def _growing(prepare_cache):
    @functools.wraps(prepare_cache)
    def prepare_growing_cache(self, generation_config, model_kwargs, *args, **kwargs):
        is_fresh = model_kwargs.get("past_key_values") is None
        prepare_cache(self, generation_config, model_kwargs, *args, **kwargs)
        if is_fresh:
            # A compiled step reads and writes buffers that hold everything.
            grow_in_place(model_kwargs.get("past_key_values"), and_windows="_steps" in vars(self))

    return prepare_growing_cache
