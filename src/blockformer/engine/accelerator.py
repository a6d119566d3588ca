"""A model on a GPU: attention of sequences without padding, long ones with soft caps or sinks, the gated delta rule.

B batch, T query length, S key length, N tokens of all sequences, n sequences, H heads, K key/value heads, D head size.
"""

import copy
import functools
import importlib.util
import inspect

import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers.utils import logging
from transformers.utils.import_utils import is_flash_linear_attention_available

from ..model.attention import Attention
from ..model.compat import causal_masks, encoder_masks, is_mapped
from ..model.positions import adds_to_scores
from .choices import is_enabled
from .unpadding import Unpadding, find_unpadding

logger = logging.get_logger(__name__)

DEVICE = "cuda"
"""The kind of device that has a kernel for sequences of any length, and graphs of steps."""
_DTYPES = (torch.float16, torch.bfloat16)
_MOST_CHANNELS = 256  # of a head, in the kernel
# Tokens of a batch, times the square of the width, from which on the device and not the host is what takes time, and so
# skipping pays: measured on an H200, where a layer of BERT keeps the host busy for half a millisecond.
_LEAST_WORK, _LEAST_WORK_OF_FLOAT32 = 8e9, 1.1e9
_LEAST_SHARE = 0.25  # of padding, by hand: below it, attention side by side costs what the other layers save
_MANY_SCORES = 2048**2  # of a row and a head, from which on they are not held at once; by hand
RULE_DEVICES = ("cuda", "xpu")
"""The kinds of devices that the kernels of the package `fla` run on."""
_LARGEST_KEY = 256  # that such a kernel holds


class Sequences(Unpadding):
    """Where sequences lie that stand one after the other, of which the caller has said where each begins.

    Nothing is read from the device: tokens are where they are, and `indices` is None.

    Args:
        shape: [B, T] of the batch.
        starts: int32 [n + 1], where each sequence begins in the flattened batch, and where the last one ends.
        longest: the tokens of the longest one.
    """

    def __init__(self, shape, starts, longest: int):
        self.shape, self.indices, self.starts, self.longest = tuple(shape), None, starts, longest

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Of the sequences, in tokens. This waits for the device, and only attention that knows no `starts` asks."""
        return self.starts.diff().tolist()


class PaddingCache:
    """Stands before a cache while an unpadded prompt runs: the cache gets zeros where the padding was.

    Args:
        cache: an empty one of the library's.
        unpadding: where the real tokens of the prompt lie.
    """

    def __init__(self, cache, unpadding: Unpadding):
        self.cache, self.unpadding = getattr(cache, "self_attention_cache", cache), unpadding

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Keep keys and values [1, K, N, D] as [B, K, T, D]; returns them as they came."""
        padded = (self._padded(states) for states in (key_states, value_states))
        self.cache.update(*padded, layer_idx, *args, **kwargs)
        return key_states, value_states

    def _padded(self, states):
        flat = states.transpose(1, 2).flatten(2)  # [1, N, K * D]
        return self.unpadding.scatter(flat).unflatten(-1, (states.shape[1], -1)).transpose(1, 2)


def is_empty(cache) -> bool:
    """Whether a cache (None: a fresh one) is known to hold nothing, without waiting for the device.

    A layer with a state does not say whether it holds something; some layer always has keys.
    """
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    return cache is None or (layers is not None and not any(getattr(each, "is_initialized", False) for each in layers))


def is_full(stack, attention_mask, past_key_values) -> bool:
    """Whether a mask [B, T] of a batch whose padding might be skipped holds none: the plain way is then the quickest.

    It is read before the device has anything to do for this batch, where waiting for it costs least.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2 or is_mapped(attention_mask):
        return False
    reads_source = stack.is_causal and stack.config.is_encoder_decoder  # its padding is never skipped
    is_due = attention_mask.device.type == DEVICE and is_empty(past_key_values) and not reads_source
    is_due = is_due and _is_plain(stack) and _is_large(attention_mask.numel(), stack.embed_tokens.weight, stack.config)
    return is_due and bool((attention_mask != 0).all())


def unpadding_of(stack, hidden_states, attention_mask, sequences: dict):
    """Where the real tokens of a batch [B, T, C] on a GPU lie, or None if its padding is computed.

    It waits for the device, to count them; not at all if the caller says where sequences begin and how long the
    longest one is (`cu_seq_lens_q`, `max_length_q`).
    """
    if hidden_states.device.type != DEVICE or not _is_plain(stack):
        return None
    has_kernel = _can_attend(hidden_states, stack.config)
    starts, longest = sequences.get("cu_seq_lens_q"), sequences.get("max_length_q")
    has_starts = starts is not None and len(starts) > 1
    if attention_mask is None and has_starts and has_kernel and stack.config._attn_implementation == "sdpa":
        longest = int(starts.diff().max()) if longest is None else int(longest)
        return Sequences(hidden_states.shape[:2], starts.int(), longest)
    tokens, width = hidden_states.shape[:2].numel(), stack.config.hidden_size
    if attention_mask is None or not _is_large(tokens, hidden_states, stack.config):
        return None
    least = 0 if has_kernel else int(_LEAST_SHARE * tokens * width**2)
    unpadding = find_unpadding(stack.config, attention_mask, None, least, DEVICE)
    if unpadding is None or unpadding.indices is None:
        return unpadding
    with torch.no_grad():
        counts = (attention_mask != 0).sum(-1, dtype=torch.int32)
        unpadding.starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    unpadding.longest = max(unpadding.lengths)
    return unpadding


class SharingAttention(Attention):
    """`Attention` on a GPU whose kernel reads keys that heads share as they are, also with a mask: see `shares_keys`.

    An `Attention` becomes one by changing its class.
    """


def has_kernel_for_shared_keys(device) -> bool:
    """Whether PyTorch prefers cuDNN's attention there, the only kernel that takes both shared keys and a mask."""
    is_cudnn = torch.version.hip is None and torch.backends.cuda.cudnn_sdp_enabled()
    return device.type == "cuda" and is_cudnn and torch.cuda.get_device_capability(device)[0] >= 9


def shares_keys(query, key, attention_mask) -> bool:
    """Whether the library would repeat keys for one token that a mask [B, 1, 1, S] says something about.

    Shapes: query [B, H, 1, D], key [B, K, S, D].
    """
    is_step = query.shape[2] == 1 and query.shape[1] > key.shape[1] and attention_mask is not None
    return is_step and _fits_kernel(query.dtype, query.shape[-1])


def is_for_sequences(query, unpadding, kwargs: dict) -> bool:
    """Whether attention has nothing but sequences to look at, on a GPU."""
    known = ("use_cache", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
    others = [name for name, value in kwargs.items() if name not in known and value is not None and value is not False]
    return query.device.type == DEVICE and hasattr(unpadding, "starts") and unpadding.masks is None and not others


def has_kernel_for(query) -> bool:
    """Whether `attend_sequences` takes queries [1, H, N, D] of this device, dtype and head size."""
    return _fits_kernel(query.dtype, query.shape[-1]) and kernel() is not None and _runs_kernel(query.device)


def _fits_kernel(dtype, channels: int) -> bool:
    """Whether kernels take heads of this dtype and size; so far the same for both."""
    return dtype in _DTYPES and channels <= _MOST_CHANNELS and channels % 8 == 0


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
    starts, longest = unpadding.starts.to(query.device), unpadding.longest
    return attend(*states, starts, starts, longest, longest, **settings)[None]


def block_masks(stack, inputs):
    """The mask of each layer type for `attend_flexibly`, or None where it is not for these `layer.StackInputs`.

    It is for many scores with soft caps or sinks, for which "sdpa" has no kernel: all of them are in memory there.
    """
    config, hidden_states, attention_mask = stack.config, inputs.hidden_states, inputs.attention_mask
    length, past_key_values, positions = hidden_states.shape[1], inputs.past_key_values, inputs.given_positions
    if (config.attn_logit_softcapping is None and not config.attention_sinks) or not _has_flex(hidden_states, config):
        return None
    drops_out = stack.training and config.attention_dropout
    is_ready = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() != 2
    total = length if past_key_values is None else past_key_values.get_mask_sizes(length, 0)[0]
    if drops_out or is_ready or length * total < _MANY_SCORES or not is_enabled():
        return None
    config = copy.copy(config)
    setattr(config, "_attn_implementation", "flex_attention")  # noqa: B010 - the library's name, not one of ours
    if stack.is_causal:
        return causal_masks(config, hidden_states, attention_mask, past_key_values, positions)
    return encoder_masks(config, hidden_states, attention_mask) if positions is None else None


def attend_flexibly(query, key, value, block_mask, scaling: float, softcap=None, s_aux=None):
    """Attention with soft caps or sinks by PyTorch's flex attention, which holds no matrix of all scores.

    Shapes: query [B, H, T, D]; key, value [B, K, S, D]; `s_aux` [H] -> [B, T, H, D]. See `eager_attention_forward`.
    """

    def capped(score, row, head, query, key):
        return softcap * torch.tanh(score / softcap)

    # Under autocast a norm widens queries and keys.
    query, key = query.to(value.dtype), key.to(value.dtype)
    settings: dict = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1], "block_mask": block_mask}
    settings |= {} if softcap is None else {"score_mod": capped}
    if s_aux is None:
        return _flex()(query, key, value, **settings).transpose(1, 2)
    has_names = "return_aux" in _names(flex_attention)
    settings |= {"return_aux": _with_sums()} if has_names else {"return_lse": True}
    output, sums = _flex()(query, key, value, **settings)  # logarithms of the sums of exponentials, [B, H, T]
    share = torch.sigmoid((sums.lse if has_names else sums) - s_aux[:, None].float())
    return (output * share[..., None].to(output.dtype)).transpose(1, 2)


@functools.cache
def _flex():
    return torch.compile(flex_attention)


def _with_sums():
    from torch.nn.attention.flex_attention import AuxRequest  # of PyTorch 2.9 and later

    return AuxRequest(lse=True)


@functools.cache
def kernel():
    """PyTorch's `varlen_attn` (2.10 and later), else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@functools.cache
def _names(function) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _is_plain(stack) -> bool:
    """Whether attention looks at queries, keys and whole sequences only, and values are as wide as keys."""
    config = stack.config
    has_terms = adds_to_scores(config.position_type) or config.attn_logit_softcapping is not None
    has_terms = has_terms or config.kv_lora_rank is not None or config.is_varied
    return not (has_terms or config.attention_sinks or "sliding_attention" in config.layer_types) and is_enabled()


def _can_attend(hidden_states, config) -> bool:
    fits = _is_half(hidden_states) and config.head_dim <= _MOST_CHANNELS and config.head_dim % 8 == 0
    return fits and kernel() is not None and _runs_kernel(hidden_states.device)


def _is_large(tokens: int, states, config) -> bool:
    """Whether so many tokens keep the device busy for longer than the host, in the dtype of `states`."""
    least = _LEAST_WORK if _is_half(states) else _LEAST_WORK_OF_FLOAT32
    return tokens * config.hidden_size**2 >= least


def _is_half(hidden_states) -> bool:
    device = hidden_states.device.type
    is_cast = torch.is_autocast_enabled(device)
    return (torch.get_autocast_dtype(device) if is_cast else hidden_states.dtype) in _DTYPES


def _has_flex(hidden_states, config) -> bool:
    """Whether flex attention takes these on this device, and PyTorch's compiler has what it needs there."""
    fits = config.head_dim in (16, 32, 64, 128, 256) and _is_half(hidden_states)
    return fits and not config.is_varied and hidden_states.device.type == DEVICE and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _runs_kernel(device) -> bool:
    """Whether the kernel is for this device: NVIDIA's from Ampere on."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8)


@functools.cache
def rule_kernels():
    """`fla`'s functions for a text and for one token, or None where it is missing, too old or cannot be imported."""
    if not is_flash_linear_attention_available():
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except Exception as error:  # of any kind: it compiles for this device
        logger.warning(f"fla is installed and cannot be imported ({error}): layers with a state run without it.")
        return None
    return chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def apply_rule(usual, layer, query, key, value, decay, step, state, sequences, dtype):
    """What `GatedDeltaRule.apply_rule` gives, by a kernel of flash-linear-attention if it has one for these.

    It takes the place of the rule itself and of nothing else: projections, convolution, norm and cache are the layer's
    own, so hooks see what they see without it. Products are computed in the layer's 16 bits, as in transformers; states
    stay in float32. H are value heads, K is the key size and V the value size.

    `usual` serves the others: float32 and float64, which the kernels round; texts in a row, which they take only one
    after the other; a token that learns, for which they have no gradient; and graphs that are traced.
    """
    learns = query.shape[2] == 1 and torch.is_grad_enabled()
    is_due = not learns and sequences is None and _has_rule_for(query, dtype) and is_enabled()
    kernels = rule_kernels() if is_due else None
    if kernels is None:
        return usual(layer, query, key, value, decay, step, state, sequences, dtype)
    by_chunk, by_token = kernels
    states = [each.transpose(1, 2).to(dtype) for each in (query, key, value)]  # [B, T, H, K or V]
    rates = {"g": decay.transpose(1, 2), "beta": step.transpose(1, 2), "scale": 1.0}
    run = by_chunk if query.shape[2] > 1 else by_token
    output, state = run(*states, **rates, initial_state=state, output_final_state=True)
    return output.transpose(1, 2), state


def _has_rule_for(query, dtype) -> bool:
    fits = query.device.type in RULE_DEVICES and dtype in _DTYPES and query.shape[-1] <= _LARGEST_KEY
    return fits and not torch.compiler.is_compiling() and not is_mapped(query)
