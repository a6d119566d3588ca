"""Which attention a fast path takes; the library's "sdpa" defines the result.

B batch, T query length, S key length, H heads, K key/value heads, D head size.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.modules.module import _has_any_global_hook

from ..model.attention import ALL_ATTENTION_FUNCTIONS, Attention
from ..model.attention import sdpa_attention as plain
from ..model.disentangled import DisentangledAttention
from ..model.latent_attention import LatentAttention
from ..watched import is_bare, is_transformed
from . import accelerator
from .choices import is_enabled
from .few_rows import attend, can_attend
from .linear import QuickLinear
from .unpadding import KnowsUnpadding, Unpadding, are_short, attend_side_by_side, attend_unpadded


def sdpa_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """`attention.sdpa_attention`, or something equivalent that is faster on a CPU for these inputs.

    Shapes: query [B, H, T, D]; key, value [B, K, S, D] -> [B, T, H, D], and None for the probabilities. An `Unpadding`
    in the place of the mask says that B is 1 and where the sequences of that row lie.
    """
    is_usual = not isinstance(module, (PreparedAttention, accelerator.SharingAttention))
    if is_usual and (attention_mask is None or type(attention_mask) is torch.Tensor):
        return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if isinstance(attention_mask, Unpadding):
        unpadding, kwargs["dropout"] = attention_mask, dropout
        return _attend_without_padding(module, query, key, value, unpadding, scaling, **kwargs)
    if isinstance(module, PreparedAttention) and module.is_cross_attention and not isinstance(module, StepAttention):
        attention_mask = _of_sources(attention_mask, query)
    if isinstance(attention_mask, BlockMask):
        caps = {name: kwargs[name] for name in ("softcap", "s_aux") if name in kwargs}
        return accelerator.attend_flexibly(query, key, value, attention_mask, scaling, **caps), None
    if "softcap" in kwargs or "s_aux" in kwargs:
        return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if isinstance(module, StepAttention) and can_attend(query, key):
        return attend(query, key, value, attention_mask, scaling), None
    if isinstance(module, accelerator.SharingAttention) and accelerator.shares_keys(query, key, attention_mask):
        settings = {"dropout_p": dropout, "scale": scaling, "enable_gqa": True}
        return F.scaled_dot_product_attention(query, key, value, attention_mask, **settings).transpose(1, 2), None
    return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _attend_without_padding(module, query, key, value, unpadding, scaling, dropout=0.0, **kwargs):
    if not {"softcap", "s_aux"} & kwargs.keys():
        is_for_sequences = accelerator.is_for_sequences(query, unpadding, kwargs)
        if is_for_sequences and not dropout and accelerator.has_kernel_for(query):
            return accelerator.attend_sequences(query, key, value, unpadding, scaling, module.is_causal), None
        if is_for_sequences or _can_be_side_by_side(unpadding, query, kwargs):
            settings = {"scaling": scaling, "dropout": dropout}
            return attend_side_by_side(plain, module, query, key, value, unpadding, **settings), None
    return attend_unpadded(
        sdpa_attention, unpadding, module, query, key, value, scaling=scaling, dropout=dropout, **kwargs
    )


def _of_sources(mask, query):
    """A source mask [B * n, 1, 1 or T, S] or None for queries [B, H, n * T, D] of n beams: [B, 1, n * T, S]."""
    if mask is None or mask.shape[0] in (1, query.shape[0]):
        return mask
    beams = mask.shape[0] // query.shape[0]
    mask = mask.expand(-1, -1, query.shape[2] // beams, -1)
    return mask.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)


def is_in_use(config) -> bool:
    """Whether a model attends by `sdpa_attention`, which compiled code knows, and not by another registered one."""
    return config._attn_implementation == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention


def _can_be_side_by_side(unpadding, query, kwargs: dict) -> bool:
    """Whether there are short sequences, and nothing but them."""
    says_something = {name for name, value in kwargs.items() if value is not None and value is not False}
    others = says_something - {"use_cache", "position_ids"}
    has_own_masks = unpadding.masks is not None and unpadding.bias is None
    return not has_own_masks and not others and is_enabled() and are_short(unpadding, query)


class UnpaddedAttention(KnowsUnpadding, Attention):
    """`Attention` of a model prepared for training. An `Attention` becomes one by changing its class."""


class PreparedAttention(UnpaddedAttention):
    """`Attention` of a model prepared for inference: n beams of an input are n * T queries of its keys."""

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

    def _masks(self, unpadding, masks, whole, query, key, distances):
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
        if length != 1 or states.device.type != "cpu" or not is_enabled() or not is_in_use(self.config):
            return False
        if torch.is_autocast_enabled("cpu") or is_transformed() or _has_any_global_hook():
            return False
        layers = (self.k_proj, self.v_proj)
        return all(type(layer) in (nn.Linear, QuickLinear) and is_bare(layer) for layer in layers)
