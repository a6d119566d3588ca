"""Attention of many tokens in bfloat16 as plain products, a block of queries at a time, where that is faster.

B batch, T query length, S key length, H heads, K key/value heads, D head size.
"""

import torch
from torch.nn import functional as F

from .measure import is_enabled, is_measured, is_quicker, random_matrix
from .watched import is_transformed

# Queries of a block; and, measured with heads of 64 and 128 channels, the multiplications of all scores
# (B * H * T * S * D) from which blocks win, and the length from which they lose again.
_BLOCK, _LEAST_WORK, _MOST_KEYS = 128, 1 << 23, 1 << 13
# Scores of a block, in elements, by hand: more would not stay in a processor's cache.
_MOST_SCORES = 1 << 24


def can_attend_in_blocks(query, key) -> bool:
    """Whether `attend_in_blocks` takes these and is faster here: many tokens on the CPU, without gradients."""
    if query.dtype is not torch.bfloat16 or query.device.type != "cpu" or query.shape[2] < _BLOCK // 2:
        return False
    batch, heads, length, size = query.shape
    keys = key.shape[2]
    if batch * heads * length * keys * size < _LEAST_WORK or keys > _MOST_KEYS:
        return False
    if batch * heads * _BLOCK * keys > _MOST_SCORES or is_transformed() or not is_enabled():
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return False
    return is_measured("attention in blocks", _measure)


def attend_in_blocks(query, key, value, attention_mask, scaling: float, is_causal: bool):
    """Scaled dot-product attention; if it is causal, half of the scores are never computed.

    The scores are rounded to bfloat16, as they are by transformers' "eager".

    Args:
        query: [B, H, T, D].
        key, value: [B, K, S, D]; of `is_causal` S = T.
        attention_mask: additive or boolean [1 or B, 1 or H, 1 or T, S] that hides no query's every key, or None. It
            cannot be combined with `is_causal`.

    Returns:
        [B, H, T, D], of which the memory is in the order B, T, H, D.
    """
    batch, heads, length, size = query.shape
    rows = batch * key.shape[1]  # B * K; the H / K heads of a key are more queries
    keys, values = key.reshape(rows, -1, size).transpose(1, 2), value.reshape(rows, -1, size)
    future = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=query.device).triu(1) if is_causal else None
    output, zero = query.new_empty(batch, length, heads, size), query.new_zeros(())
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        seen = stop if is_causal else keys.shape[2]
        folded = query[:, :, start:stop].reshape(rows, -1, size)  # [B * K, H / K * block, D]
        scores = torch.baddbmm(zero, folded, keys[:, :, :seen], beta=0, alpha=scaling)
        by_head = scores.view(batch, heads, stop - start, seen)
        if future is not None:
            by_head[..., start:].masked_fill_(future[: stop - start, : stop - start], -torch.inf)
        elif attention_mask is not None:
            part = attention_mask[:, :, start:stop] if attention_mask.shape[2] > 1 else attention_mask
            by_head.masked_fill_(~part, -torch.inf) if part.dtype is torch.bool else by_head.add_(part)
        weighted = torch.bmm(scores.softmax(-1), values[:, :seen])
        output[:, start:stop] = weighted.view(batch, heads, -1, size).transpose(1, 2)
    return output.transpose(1, 2)


@torch.no_grad()
def _measure() -> bool:
    """This takes some tens of milliseconds."""
    query, key, value = (random_matrix(8 * 256, 64).bfloat16().view(1, 8, 256, 64) for _ in range(3))
    return is_quicker(
        lambda: attend_in_blocks(query, key, value, None, 0.125, True),
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        rounds=4,
    )
