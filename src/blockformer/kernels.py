"""The fast paths, each beside the plain way that defines it. `BLOCKFORMER_FAST=0` turns all of them off.

B batch, S key length, H heads, K key/value heads, D head size.
"""

import os

import torch
from torch.nn import functional as F


def fast_paths_enabled() -> bool:
    """Whether fast paths may be taken: not where a graph is traced, and not with BLOCKFORMER_FAST=0."""
    return os.environ.get("BLOCKFORMER_FAST", "1") != "0" and not torch.compiler.is_compiling()


def can_attend_grouped(query, key, kwargs: dict) -> bool:
    """Whether `attend_grouped` takes these: one query token on the CPU whose heads share keys, and no paged cache."""
    is_grouped = query.shape[2] == 1 and query.shape[1] > key.shape[1]
    return is_grouped and query.device.type == "cpu" and kwargs.get("cache") is None and fast_paths_enabled()


def attend_grouped(query, key, value, attention_mask, scaling: float, dropout: float):
    """Scaled dot-product attention of one query token, with the heads that share a key as its queries.

    The same as repeating keys and values for each head, without reading them once a head.

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
    return output.reshape(batch, 1, heads, size)
