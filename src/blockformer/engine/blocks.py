"""Attention of many tokens as plain products, a block of queries at a time, on processors where that is faster.

B batch, T query length, S key length, H heads, K key/value heads, D head size.
"""

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .linear import is_transformed
from .measure import is_enabled, is_measured, is_quicker, random_matrix


@dataclass(frozen=True)
class _Kind:
    """How a dtype's attention is cut, and which sizes gain from it.

    Attributes:
        block: queries of a block.
        least_work: multiplications of all scores, B * H * T * S * D, from which on.
        most_keys: up to which.
    """

    block: int
    least_work: int
    most_keys: int


# Measured with heads of 64 and 128 channels: the work from which blocks win, and the length from which they lose again.
_KINDS = {torch.bfloat16: _Kind(128, 1 << 23, 1 << 13), torch.float32: _Kind(64, 1 << 25, 1 << 10)}
# Scores of a block, in elements: more would not stay in a processor's cache.
_MOST_SCORES = 1 << 24


def can_attend_in_blocks(query, key) -> bool:
    """Whether `attend_in_blocks` takes these and is faster here: many tokens on the CPU, without gradients."""
    kind = _KINDS.get(query.dtype)
    if kind is None or query.device.type != "cpu" or query.shape[2] < kind.block // 2:
        return False
    batch, heads, length, size = query.shape
    keys = key.shape[2]
    if not kind.least_work <= batch * heads * length * keys * size or keys > kind.most_keys:
        return False
    if batch * heads * kind.block * keys > _MOST_SCORES or is_transformed() or not is_enabled():
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return False
    return is_measured(f"attention in blocks, {query.dtype}", functools.partial(_measure, query.dtype))


def attend_in_blocks(query, key, value, attention_mask, scaling: float, is_causal: bool):
    """Scaled dot-product attention; if it is causal, half of the scores are never computed.

    In bfloat16 the scores are rounded to it, as they are by transformers' "eager".

    Args:
        query: [B, H, T, D].
        key, value: [B, K, S, D]; of `is_causal` S = T.
        attention_mask: additive or boolean [1 or B, 1 or H, 1 or T, S] that hides no query's every key, or None. It
            cannot be combined with `is_causal`.

    Returns:
        [B, H, T, D], of which the memory is in the order B, T, H, D.
    """
    batch, heads, length, size = query.shape
    rows, count = batch * key.shape[1], _KINDS[query.dtype].block  # B * K; the H / K heads of a key are more queries
    keys, values = key.reshape(rows, -1, size).transpose(1, 2), value.reshape(rows, -1, size)
    future = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1) if is_causal else None
    output, zero = query.new_empty(batch, length, heads, size), query.new_zeros(())
    for start in range(0, length, count):
        stop = min(start + count, length)
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
def _measure(dtype) -> bool:
    """This takes some tens of milliseconds."""
    query, key, value = (random_matrix(8 * 256, 64).to(dtype).view(1, 8, 256, 64) for _ in range(3))
    return is_quicker(
        lambda: attend_in_blocks(query, key, value, None, 0.125, True),
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        rounds=4,
    )
