"""Attention over the sequences of an unpadded row: one product for all that are short, one for each that is long.

N tokens of all sequences, n sequences, L tokens of the longest, H heads, K key/value heads, D head size.
"""

import functools

import torch
from torch.nn import functional as F

# Scores of a sequence, times the width of all heads, up to which a product of its own costs more than padding it. By
# hand, between two measurements: BERT of 6 x 256 gains a third with rows of 3 to 6 tokens and nothing with 20 to 60.
_SHORT = 1 << 19


def attend_sequences(
    query, key, value, lengths: list, scaling: float, is_causal: bool, position_bias=None, dropout=0.0
):
    """Scaled dot-product attention of each sequence to itself.

    Args:
        query: [1, H, N, D].
        key, value: [1, K, N, D].
        lengths: of the sequences, in tokens; together N.
        position_bias: [1, H, L or more, L or more], added to the scores, or None. Not together with `is_causal`.
        dropout: the share of the probabilities that is dropped.

    Returns:
        [1, N, H, D], contiguous.
    """
    lengths = [length for length in lengths if length]
    settings: dict = {"scale": scaling, "is_causal": is_causal}
    if dropout:
        settings["dropout_p"] = dropout
    if query.shape[1] != key.shape[1]:
        settings["enable_gqa"] = True

    def attend(query, key, value, *, mask=None):
        return F.scaled_dot_product_attention(query, key, value, mask, **settings)

    longest = max(lengths)
    if position_bias is not None:
        position_bias = position_bias[..., :longest, :longest]  # a batch may be wider than its longest sequence
    states = [each[0].transpose(0, 1) for each in (query, key, value)]  # [N, H or K, D]
    if min(lengths) == longest:
        query, key, value = (each.unflatten(0, (-1, longest)).transpose(1, 2) for each in states)
        return attend(query, key, value, mask=position_bias).transpose(1, 2).flatten(0, 1)[None].contiguous()
    if not is_short(lengths, query):
        outputs = [
            attend(*parts, mask=None if position_bias is None else position_bias[..., :length, :length])
            for length, *parts in zip(
                lengths, *(each.split(lengths, dim=2) for each in (query, key, value)), strict=True
            )
        ]
        return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)
    padded, indices, real = _padding(tuple(lengths))
    query, key, value = (each[padded].transpose(1, 2) for each in states)  # [n, H or K, L, D]
    if is_causal:  # no token sees the padding behind it
        mask = None
    elif position_bias is None:
        mask = real
    else:
        mask = position_bias.masked_fill(~real, torch.finfo(position_bias.dtype).min)
    return attend(query, key, value, mask=mask).transpose(1, 2).flatten(0, 1)[indices][None]


def is_short(lengths: list, query) -> bool:
    """Whether all of these sequences are short enough to be padded to the longest."""
    return max(lengths) ** 2 * query.shape[1] * query.shape[3] <= _SHORT


@functools.lru_cache(maxsize=8)
def _padding(lengths: tuple):
    """Each token's index in a padded batch, and back.

    Returns:
        The token at each index, int64 [n, L], at padding the first of its own sequence, so that a NaN reaches no other
        one; the index of each token, [N]; which of them have one, bool [n, 1, 1, L].
    """
    # Whatever the default device is at the first call
    with torch.inference_mode(False), torch.device("cpu"):
        counts = torch.tensor(lengths)
        real = torch.arange(max(lengths)) < counts[:, None]
        indices = real.flatten().nonzero().flatten()
        padded = (counts.cumsum(0) - counts)[:, None].repeat(1, real.shape[1])
        padded[real] = torch.arange(len(indices))
        return padded, indices, real[:, None, None, :]
