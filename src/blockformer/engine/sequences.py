"""Attention over the sequences of an unpadded row, which are padded again for it, and for nothing else.

N tokens of all sequences, n sequences, L tokens of the longest, H heads, K key/value heads, D head size.
"""

import torch

# Scores of a sequence, times the width of all heads, up to which a matmul of its own costs more than padding it, on a
# CPU. By hand, between two measurements: BERT of 6 x 256 gains a third with rows of 3 to 6 tokens and nothing with 20
# to 60.
_SHORT = 1 << 19


def are_short(unpadding, query) -> bool:
    """Whether all sequences of queries [1, H, N, D] are short enough to be padded to the longest."""
    return max(unpadding.lengths) ** 2 * query.shape[1] * query.shape[3] <= _SHORT


def attend_side_by_side(attend, module, query, key, value, unpadding, **kwargs):
    """Attention of each sequence to itself, one under the other.

    Every sequence stands from its row's first column on, so that a causal one needs no mask: padding comes after all
    that is read. In the padding stands the first token of the same sequence, so that a NaN reaches no other one.

    Args:
        attend: a function as the library has them.
        query: [1, H, N, D]; `key` and `value` [1, K, N, D].
        unpadding: where the sequences lie; it may have a bias of the scores, a decoder's of which hides what comes
            later.

    Returns:
        [1, N, H, D], contiguous.
    """
    tokens, places, is_real = _side_by_side(unpadding, query.device)
    states = (each[0].transpose(0, 1)[tokens].transpose(1, 2) for each in (query, key, value))  # [n, H or K, L, D]
    if unpadding.bias is not None:
        mask = unpadding.bias[
            ..., : tokens.shape[1], : tokens.shape[1]
        ]  # a batch may be wider than its longest sequence
        mask = mask if is_real is None else mask.masked_fill(~is_real, torch.finfo(mask.dtype).min)
    else:
        mask = None if module.is_causal else is_real
    output = attend(module, *states, mask, **kwargs)[0]  # [n, L, H, D]
    return output.flatten(0, 1)[places][None]


def _side_by_side(unpadding, device):
    """The token at each place of a padded batch, int64 [n, L], and each token's place, int64 [N].

    Third, which places have a token of their own, bool [n, 1, 1, L]; None if all have.
    """
    if unpadding.side_by_side is None:
        lengths = [length for length in unpadding.lengths if length]
        longest, total = max(lengths), sum(lengths)
        with device:  # whatever the default device is
            counts, columns = torch.tensor(lengths), torch.arange(longest)
            starts = counts.cumsum(0) - counts
            rows = torch.repeat_interleave(counts, output_size=total)
            is_real = columns < counts[:, None]
            tokens = starts[:, None] + columns * is_real
            places = rows * longest + torch.arange(total) - starts[rows]
        known = None if min(lengths) == longest else is_real[:, None, None]
        unpadding.side_by_side = tokens, places, known
    return unpadding.side_by_side
