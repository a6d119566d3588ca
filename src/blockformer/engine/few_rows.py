"""Matmuls and attention of few rows, written out for the compiler.

A call of a library's matmul costs microseconds, and for few rows a small layer takes no longer than that. Written out,
matmuls are loops like any other, and the compiler puts them into one kernel with the norms and activations around
them. Its loops also read large weights as fast as the libraries' matmuls do, or faster.

B rows, T query tokens, S tokens, H heads, K key/value heads, D head size; I inputs and O outputs of a linear layer.
"""

import torch

# Rows up to which a product is a loop: it reads each weight once, for all of them. By hand.
MOST_ROWS = 4
# Tokens whose products are one step of the loop over values: a sum of four takes fewer additions in a row. By hand.
BLOCK = 4
# Parts of a weight that one loop reads side by side: a processor reads one of them no faster than its memory answers
# single requests. With 2 threads of an Intel Xeon, 4 parts of 151,936 x 1,024 are read at 31 GB/s, one at 21. A weight
# of fewer numbers than the second is one part: queries, keys and values are one loop, whose sums for several rows must
# fit into the registers. By hand: 512 x 512 is faster as one part (docs/measurements.md, "Compiled steps").
STREAMS, _LEAST_IN_STREAMS = 4, 1 << 19
# Queries that share a key, up to which the loop over the keys has a sum for each; by hand.
_MOST_QUERIES = 16


def rows_of(states, count: int):
    """States [..., I] of so many rows as float32 [R, I]."""
    return computed_once(states.reshape(count, -1))


def multiplied(weight, row):
    """A weight [O, I] times a row [I], in float32: [O]; a large weight in parts side by side."""
    streams = STREAMS if weight.numel() >= _LEAST_IN_STREAMS else 1
    parts = weight.split(max(1, weight.shape[0] // streams))
    return torch.cat([(part.float() * row).sum(-1) for part in parts])


def as_rows(outputs: list, states, bias=None):
    """The outputs [O] of all that `rows_of` gave, and a bias [O] or None, as those [..., O] of the states."""
    if bias is not None:
        outputs = [output + bias.float() for output in outputs]
    output = torch.stack(outputs) if len(outputs) > 1 else outputs[0]
    return output.to(states.dtype).reshape(*states.shape[:-1], -1)


def computed_once(states):
    """States of any shape in float32, which the compiler computes once, not again for each output of a product."""
    states = states.float().contiguous()
    return states.as_strided(states.shape, states.stride())


def can_attend(query, key) -> bool:
    """Whether `attend` takes these: one query token, or few that see the same keys."""
    queries = query.shape[2]
    return query.dtype is not torch.float64 and (
        _is_always(queries == 1) or _is_always(queries * (query.shape[1] // key.shape[1]) <= _MOST_QUERIES)
    )


def attend(query, key, value, attention_mask, scaling: float):
    """Scaled dot-product attention of one query token or few, computed in float32; each key and value is read once.

    Args:
        query: [B, H, T, D].
        key, value: [B, K, S, D].
        attention_mask: additive or boolean [1 or B, 1 or H, 1 or T, S].

    Returns:
        [B, T, H, D].
    """
    batch, heads, queries, size = query.shape
    keys, length = key.shape[1:3]
    shared = range(heads // keys * queries)
    folded = computed_once(query.reshape(batch, keys, -1, 1, size) * scaling)  # [B, K, H / K * T, 1, D]
    scores = torch.stack([(folded[:, :, each] * key.float()).sum(-1) for each in shared], 2)
    scores = scores.reshape(batch, heads, queries, length)
    if attention_mask.dtype is torch.bool:
        weights = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights.masked_fill(~attention_mask, 0.0)  # where no key is seen, all of them are zero
    else:
        weights = (scores + attention_mask.float()).softmax(-1)
    block = BLOCK if _is_always(length % BLOCK == 0) else 1
    weights = computed_once(weights).view(batch, keys, -1, length // block, block)
    values = value.reshape(batch, keys, length // block, block, size).float()
    products = [
        sum(weights[:, :, each, :, token, None] * values[:, :, :, token] for token in range(block)).sum(2)
        for each in shared
    ]
    return torch.stack(products, 2).to(query.dtype).reshape(batch, heads, queries, size).transpose(1, 2)


def _is_always(condition) -> bool:
    """Whether a condition on sizes holds for all sizes that a graph is for."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # half a second, which no other call needs

    return statically_known_true(condition)
