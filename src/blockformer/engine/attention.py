"""Attention on the CPU with fewer and larger products; the library's "sdpa" defines the result.

B batch, T query length, S key length, H heads, K key/value heads, D head size.
"""

from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from ..model.attention import ALL_ATTENTION_FUNCTIONS, Attention
from ..model.attention import sdpa_attention as plain
from ..model.disentangled import DisentangledAttention
from . import accelerator
from .beams import SharesSources
from .blocks import attend_in_blocks, can_attend_in_blocks
from .few_rows import attend, can_attend
from .measure import is_enabled
from .sequences import attend_sequences, is_short
from .unpadding import KnowsUnpadding, Unpadding, attend_unpadded


def sdpa_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """`attention.sdpa_attention`, or something equivalent that is faster on a CPU for these inputs.

    Shapes: query [B, H, T, D]; key, value [B, K, S, D] -> [B, T, H, D], and None for the probabilities. An `Unpadding`
    in the place of the mask says that B is 1 and where the sequences of that row lie.
    """
    if isinstance(attention_mask, Unpadding):
        unpadding, kwargs["dropout"] = attention_mask, dropout
        return _attend_without_padding(module, query, key, value, unpadding, scaling, **kwargs)
    if isinstance(module, SharesSources) and module.is_cross_attention and not isinstance(module, StepAttention):
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
    if can_attend_grouped(query, key, kwargs):
        return attend_grouped(query, key, value, attention_mask, scaling, dropout), None
    if isinstance(module, PreparedAttention) and attention_mask is None and not dropout and kwargs.get("cache") is None:
        is_whole = query.shape[2] == key.shape[2] or not module.is_causal
        if is_whole and can_attend_in_blocks(query, key):
            output = attend_in_blocks(query, key, value, None, scaling, module.is_causal)
            return output.transpose(1, 2), None
    return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _attend_without_padding(module, query, key, value, unpadding, scaling, dropout=0.0, **kwargs):
    if not {"softcap", "s_aux"} & kwargs.keys():
        if accelerator.is_for_sequences(query, unpadding, kwargs) and not dropout:
            if accelerator.has_kernel_for(query):
                return accelerator.attend_sequences(query, key, value, unpadding, scaling, module.is_causal), None
            given = (plain, module, query, key, value, unpadding)
            return accelerator.attend_side_by_side(*given, scaling=scaling), None
        if can_attend_sequences(unpadding, query, kwargs):
            # A decoder's bias hides what comes later.
            is_causal = module.is_causal and unpadding.bias is None
            how = {"dropout": dropout, "in_blocks": isinstance(module, PreparedAttention)}
            parts = (query, key, value, unpadding.lengths)
            return attend_sequences(*parts, scaling, is_causal, unpadding.bias, **how), None
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


def can_attend_sequences(unpadding, query, kwargs: dict) -> bool:
    """Whether `attend_sequences` takes these: sequences that are short, and nothing but them."""
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    others = given - {"use_cache", "position_ids"}
    has_own_masks = unpadding.masks is not None and unpadding.bias is None
    return not has_own_masks and not others and is_enabled() and is_short(unpadding.lengths, query)


def can_attend_grouped(query, key, kwargs: dict) -> bool:
    """Whether `attend_grouped` takes these: one query token on the CPU whose heads share keys, and no paged cache."""
    is_grouped = query.shape[2] == 1 and query.shape[1] > key.shape[1]
    return is_grouped and query.device.type == "cpu" and kwargs.get("cache") is None and is_enabled()


def attend_grouped(query, key, value, attention_mask, scaling: float, dropout: float):
    """Scaled dot-product attention of one query token, with the heads that share a key as its queries.

    The same as repeating keys and values for each head, but each is read only once.

    Args:
        query: [B, H, 1, D].
        key, value: [B, K, S, D].
        attention_mask: additive or boolean [1 or B, 1 or H, 1, S], or None.

    Returns:
        [B, 1, H, D].
    """
    batch, heads, _, size = query.shape
    folded = query.reshape(batch, key.shape[1], -1, size)  # [B, K, H / K, D]
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.shape[1] > 1:
            attention_mask = attention_mask.reshape(attention_mask.shape[0], key.shape[1], -1, key.shape[2])
    output = F.scaled_dot_product_attention(folded, key, value, attention_mask, dropout, scale=scaling)
    return output.reshape(batch, 1, heads, -1)


class UnpaddedAttention(KnowsUnpadding, Attention):
    """`Attention` of a model prepared for training. An `Attention` becomes one by changing its class."""


class PreparedAttention(SharesSources, UnpaddedAttention):
    """`Attention` of a model prepared for inference: it may attend in blocks."""

    def _attends_by_engine(self) -> bool:
        return is_in_use(self.config) and is_enabled()


class StepAttention(PreparedAttention):
    """`Attention` in a compiled step on a CPU: one query token, or few, as loops over the keys."""


class UnpaddedDisentangledAttention(KnowsUnpadding, DisentangledAttention):
    """`DisentangledAttention` of a prepared model. One becomes the other by changing its class."""

    def _masks(self, unpadding, masks, whole, query, key, distances):
        of_distances = self._of_distances(distances)
        for parts in zip(unpadding.split(query), unpadding.split(key), strict=True):
            yield self._terms_of(*parts, *of_distances)
