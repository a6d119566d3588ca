"""A model on a GPU: attention of sequences of any length, so that padding is skipped there too, and compiled steps.

N tokens of all sequences, n sequences, H heads, K key/value heads, D head size.
"""

import functools
import inspect

import torch

from ..positions import SCORE_TERMS
from ..unpadding import Unpadding, find_unpadding
from .measure import is_enabled

DEVICE = "cuda"
"""The kind of device that has a kernel for sequences of any length."""
COMPILES = ("cuda", "xpu")
"""The kinds of device on which `generate` compiles a step over a static cache by itself."""
_DTYPES = (torch.float16, torch.bfloat16)
_MOST_CHANNELS = 256  # of a head, in the kernel


class Sequences(Unpadding):
    """Where sequences lie that stand one after the other, of which the caller has said where each begins.

    Nothing is read from the device: tokens are where they are.

    Args:
        shape: [B, T] of the batch.
        starts: int32 [n + 1], where each sequence begins in the flattened batch, and where the last one ends.
        longest: the tokens of the longest one.
    """

    def __init__(self, shape, starts, longest: int):
        self.shape, self.starts, self.longest = tuple(shape), starts, longest

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Of the sequences, in tokens. This waits for the device, and only attention that knows no `starts` asks."""
        return self.starts.diff().tolist()

    def gather(self, states):
        """[B, T, ...] -> [1, N, ...]."""
        return states.expand(*self.shape, *states.shape[2:]).flatten(0, 1)[None]

    def scatter(self, states):
        """[1, N, C] -> [B, T, C]."""
        return states.view(*self.shape, -1)


def unpadding_of(stack, hidden_states, attention_mask, position_ids, sequences: dict):
    """Where the real tokens of a batch on a GPU lie, or None if its padding is computed: see `Runtime.unpadding`.

    It waits for the device once, to count them; not at all if the caller says where sequences begin and how long the
    longest one is (`cu_seq_lens_q`, `max_length_q`).
    """
    if hidden_states.device.type != DEVICE or not _is_plain(stack) or not _can_attend(hidden_states, stack.config):
        return None
    starts, longest = sequences.get("cu_seq_lens_q"), sequences.get("max_length_q")
    if attention_mask is None and starts is not None and stack.config._attn_implementation == "sdpa":
        longest = int(starts.diff().max()) if longest is None else int(longest)
        return Sequences(hidden_states.shape[:2], starts.int(), longest)
    if attention_mask is None:
        return None
    unpadding = find_unpadding(stack.config, attention_mask, None, device=DEVICE)
    if unpadding is None:
        return None
    with torch.no_grad():
        counts = (attention_mask != 0).sum(-1, dtype=torch.int32)
        unpadding.starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    unpadding.longest = max(unpadding.lengths)
    return unpadding


def is_for_sequences(query, attention_mask, unpadding, kwargs: dict) -> bool:
    """Whether `attend_sequences` takes these: a GPU's, with nothing but sequences to look at."""
    known = ("use_cache", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    others = [name for name, value in kwargs.items() if value is not None and name not in known]
    is_there = query.device.type == DEVICE and query.dtype in _DTYPES and hasattr(unpadding, "starts")
    return is_there and attention_mask is None and not others and kernel() is not None


def attend_sequences(query, key, value, unpadding, scaling: float, is_causal: bool):
    """Attention of each sequence to itself, by PyTorch's kernel for sequences of any length.

    Args:
        query: [1, H, N, D]; `key` and `value` [1, K, N, D].
        unpadding: with `starts` and `longest`, see `Sequences`.

    Returns:
        [1, N, H, D].
    """
    attend = kernel()
    names = _names(attend)
    states = [each[0].transpose(0, 1) for each in (query, key, value)]  # [N, H or K, D]
    settings: dict = {"scale": scaling}
    # PyTorch has renamed these since it has the kernel.
    settings |= (
        {"is_causal": is_causal} if "is_causal" in names else {"window_size": (-1, 0) if is_causal else (-1, -1)}
    )
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in names:
            settings["enable_gqa"] = True
        else:
            times = query.shape[1] // key.shape[1]
            states[1:] = [each.repeat_interleave(times, dim=1) for each in states[1:]]
    starts, longest = unpadding.starts, unpadding.longest
    return attend(*states, starts, starts, longest, longest, **settings)[None]


@functools.cache
def kernel():
    """PyTorch's `varlen_attn` (2.10 and later); None if this PyTorch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@functools.cache
def _names(function) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _is_plain(stack) -> bool:
    """Whether attention looks at queries, keys and whole sequences only."""
    config = stack.config
    has_terms = config.position_type in SCORE_TERMS or config.attn_logit_softcapping is not None
    return not (has_terms or config.attention_sinks or "sliding_attention" in config.layer_types) and is_enabled()


def _can_attend(hidden_states, config) -> bool:
    device = hidden_states.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else hidden_states.dtype
    fits = dtype in _DTYPES and config.head_dim <= _MOST_CHANNELS and config.head_dim % 8 == 0
    return fits and kernel() is not None and _runs_kernel(hidden_states.device)


@functools.cache
def _runs_kernel(device) -> bool:
    """Whether the kernel is for this device: NVIDIA's from Ampere on."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8)
