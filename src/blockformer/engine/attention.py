"""Which attention a fast path takes, and the gated delta rule on a GPU; the library's "sdpa" defines the result.

B batch, T query length, S key length, N tokens of all sequences, H heads, K key/value heads, D head size.
"""

import copy
import functools
import importlib.util
import inspect

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging
from transformers.utils.import_utils import is_flash_linear_attention_available

from ..model.attention import ALL_ATTENTION_FUNCTIONS, LIBRARY, Attention
from ..model.attention import sdpa_attention as plain
from ..model.compat import causal_masks, encoder_masks, is_mapped
from ..model.disentangled import DisentangledAttention
from ..model.latent_attention import LatentAttention
from ..watched import has_global_hook, is_bare
from .choices import is_enabled
from .few_rows import attend, can_attend
from .linear import QuickLinear, may_multiply_otherwise
from .unpadding import KnowsUnpadding, Unpadding, are_short, attend_side_by_side, attend_unpadded

logger = logging.get_logger(__name__)

DEVICE = "cuda"
"""The kind of device that has a kernel for sequences of any length, and graphs of steps."""
_DTYPES = (torch.float16, torch.bfloat16)
_MOST_CHANNELS = 256  # of a head, in the kernel
_MANY_SCORES = 2048**2  # of a row and a head, from which on they are not held at once; by hand
# Arguments of attention that say no more than where the sequences of a row lie.
_SAY_NO_MORE = {
    "use_cache", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
}  # fmt: skip
RULE_DEVICES = ("cuda", "xpu")
"""The kinds of devices that the kernels of the package `fla` run on."""
_LARGEST_KEY = 256  # that such a kernel holds


def sdpa_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """`attention.sdpa_attention`, or something equivalent that is faster on a CPU for these inputs.

    Shapes: query [B, H, T, D]; key, value [B, K, S, D] -> [B, T, H, D], and None for the probabilities. An `Unpadding`
    in the place of the mask says that B is 1 and where the sequences of that row lie.
    """
    if isinstance(attention_mask, Unpadding):
        unpadding, kwargs["dropout"] = attention_mask, dropout
        return _attend_without_padding(module, query, key, value, unpadding, scaling, **kwargs)
    if isinstance(module, PreparedAttention) and module.is_cross_attention and not isinstance(module, StepAttention):
        attention_mask = _of_sources(attention_mask, query)
    if isinstance(attention_mask, BlockMask):
        caps = {name: kwargs[name] for name in ("softcap", "s_aux") if name in kwargs}
        return attend_flexibly(query, key, value, attention_mask, scaling, **caps), None
    if "softcap" in kwargs or "s_aux" in kwargs:
        return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if isinstance(module, StepAttention) and can_attend(query, key):
        return attend(query, key, value, attention_mask, scaling), None
    if isinstance(module, SharingAttention) and shares_keys(query, key, attention_mask):
        settings = {"dropout_p": dropout, "scale": scaling, "enable_gqa": True}
        return F.scaled_dot_product_attention(query, key, value, attention_mask, **settings).transpose(1, 2), None
    return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _attend_without_padding(module, query, key, value, unpadding, scaling, dropout=0.0, **kwargs):
    settings = {"scaling": scaling, "dropout": dropout}
    more = {name for name, value in kwargs.items() if value is not None and value is not False}
    if more <= _SAY_NO_MORE and unpadding.masks is None and is_enabled():
        is_on_gpu = query.device.type == DEVICE and unpadding.starts is not None and unpadding.bias is None
        if is_on_gpu and not dropout and has_kernel(query.dtype, query.shape[-1], query.device):
            return attend_sequences(query, key, value, unpadding, scaling, module.is_causal), None
        if is_on_gpu or are_short(unpadding, query):
            return attend_side_by_side(module, query, key, value, unpadding, **settings), None
    return attend_unpadded(module, query, key, value, unpadding, **settings, **kwargs), None


def _of_sources(mask, query):
    """A source mask [B * n, 1, 1 or T, S] or None for queries [B, H, n * T, D] of n beams: [B, 1, n * T, S]."""
    if mask is None or mask.shape[0] in (1, query.shape[0]):
        return mask
    beams = mask.shape[0] // query.shape[0]
    mask = mask.expand(-1, -1, query.shape[2] // beams, -1)
    return mask.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)


def is_in_use(config) -> bool:
    """Whether a model attends by `sdpa_attention`, which compiled code knows, and not by another registered one."""
    is_usual = ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention and LIBRARY["sdpa"] is sdpa_attention_forward
    return config._attn_implementation == "sdpa" and is_usual


class SharingAttention(Attention):
    """`Attention` on a GPU whose kernel reads keys that heads share as they are, also with a mask: see `shares_keys`.

    An `Attention` becomes one by changing its class.
    """


class PreparedAttention(KnowsUnpadding, Attention):
    """`Attention` of a prepared model: n beams of an input are n * T queries of its keys.

    An `Attention` becomes one by changing its class.
    """

    def states_of(self, *states, **named):
        """Queries [B, H, n * T, D], keys and values [B, K, S, D]."""
        query, key, value = super().states_of(*states, **named)
        if query.shape[0] != key.shape[0]:
            query = query.unflatten(0, (key.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return query, key, value


class StepAttention(PreparedAttention):
    """`Attention` in a compiled step on a CPU: one query token, or few, as loops over the keys."""


class UnpaddedDisentangledAttention(KnowsUnpadding, DisentangledAttention):
    """`DisentangledAttention` of a prepared model. One becomes the other by changing its class."""

    def _masks(self, unpadding, whole, query, key, distances):
        of_distances = self._of_distances(distances)
        for parts in zip(unpadding.split(query), unpadding.split(key), strict=True):
            yield self._terms_of(*parts, *of_distances)


class PreparedLatentAttention(LatentAttention):
    """`LatentAttention` of a prepared model. One becomes the other by changing its class.

    For one more token on the CPU the cached vectors are compared with as they are. A head's key is W c, made from the
    latent vector c of a token. A query q meets it as q · W c = (W^T q) · c, and a sum of values, sum_s p_s V c_s, is
    V (sum_s p_s c_s). So W and V are multiplied once by what one token has, not by all cached vectors: DeepSeek-V2
    (2024), section 2.1.2. R rotated channels of a head, V value size, L latent size.
    """

    def with_heads(self, query, latents, shared):
        """For one token, queries [B, H, 1, R + L], keys [B, 1, S, R + L] and values [B, 1, S, L]."""
        if not self._takes(query, query.shape[2]):
            return super().with_heads(query, latents, shared)
        rotated = shared.shape[-1]
        matrices = self.k_proj.weight.unflatten(0, (query.shape[1], -1))  # [H, D - R, L]
        query = torch.cat((query[..., :rotated], query[..., rotated:] @ matrices), dim=-1)
        return query, torch.cat((shared, latents), dim=-1), latents

    def before_output(self, output, hidden_states):
        """[B, 1, H * L], weighted sums of latent vectors -> [B, 1, H * V]."""
        if not self._takes(hidden_states, hidden_states.shape[1]):
            return output
        heads = len(self.heads)
        matrices = self.v_proj.weight.unflatten(0, (heads, -1))  # [H, V, L]
        return (output.view(-1, heads, 1, output.shape[-1] // heads) @ matrices.mT).reshape(len(output), 1, -1)

    def _takes(self, states, length: int) -> bool:
        """Whether this is one token of each row, and two plain matmuls may change their order."""
        if length != 1 or not may_multiply_otherwise(states) or not is_in_use(self.config) or has_global_hook():
            return False
        layers = (self.k_proj, self.v_proj)
        return all(type(layer) in (nn.Linear, QuickLinear) and is_bare(layer) for layer in layers)


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


def has_kernel(dtype, channels: int, device) -> bool:
    """Whether `attend_sequences` takes heads of this dtype and size on this device."""
    return _fits_kernel(dtype, channels) and kernel() is not None and _runs_kernel(device)


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


def is_half(states) -> bool:
    """Whether matmuls of these states have 16 bits."""
    return dtype_in(states) in _DTYPES


def dtype_in(states) -> torch.dtype:
    """The dtype of matmuls of these states: autocast's, where that is on."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _has_flex(hidden_states, config) -> bool:
    """Whether flex attention takes these on this device, and PyTorch's compiler has what it needs there."""
    fits = config.head_dim in (16, 32, 64, 128, 256) and is_half(hidden_states)
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
