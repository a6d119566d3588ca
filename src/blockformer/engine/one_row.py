"""The product and the attention of one row, written out for the compiler.

A call of a library's product costs microseconds, and for one row a small layer takes no longer than that. Written out,
products are loops like any other, and the compiler puts them into one kernel with the norms and activations around
them. Its loops also read large weights as fast as the libraries' products do, or faster.

B rows, S tokens, H heads, K key/value heads, D head size; I inputs and O outputs of a linear layer.
"""

import torch

# Tokens whose products are one step of the loop over values: a sum of four takes fewer additions in a row.
BLOCK = 4


def with_one_row_products(program):
    """An exported program (`torch.export`) whose linear layers of one row are loops."""
    return program.run_decompositions({torch.ops.aten.linear.default: _product})


def _product(states, weight, bias=None):
    """`F.linear` of states [..., I] that are one row, weight [O, I]; summed in float32."""
    is_one = all(type(size) is int and size == 1 for size in states.shape[:-1])
    if not is_one or weight.dtype is torch.float64:
        return NotImplemented
    output = (weight.float() * computed_once(states.reshape(-1))).sum(-1)
    output = output if bias is None else output + bias.float()
    return output.to(states.dtype).reshape(*states.shape[:-1], -1)


def computed_once(states):
    """States of any shape in float32, which the compiler computes once, and not anew for each output of a product."""
    states = states.float().contiguous()
    return states.as_strided(states.shape, states.stride())


def attend_one_token(query, key, value, attention_mask, scaling: float):
    """Scaled dot-product attention of one query token a row, computed in float32; each key and value is read once.

    Args:
        query: [B, H, 1, D].
        key, value: [B, K, S, D], S a multiple of `BLOCK`.
        attention_mask: additive or boolean [1 or B, 1 or H, 1, S].

    Returns:
        [B, 1, H, D].
    """
    batch, heads, _, size = query.shape
    keys, length = key.shape[1:3]
    folded = computed_once(query.reshape(batch, keys, -1, 1, size) * scaling)  # [B, K, H / K, 1, D]
    shared = range(heads // keys)
    scores = torch.stack([(folded[:, :, head] * key.float()).sum(-1) for head in shared], 2)
    scores = scores.reshape(batch, heads, 1, length)
    if attention_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    else:
        scores = scores + attention_mask.float()
    weights = computed_once(scores.softmax(-1)).view(batch, keys, -1, length // BLOCK, BLOCK)
    values = value.reshape(batch, keys, length // BLOCK, BLOCK, size).float()
    products = [
        sum(weights[:, :, head, :, each, None] * values[:, :, :, each] for each in range(BLOCK)).sum(2)
        for head in shared
    ]
    return torch.stack(products, 2).to(query.dtype).reshape(batch, 1, heads, size)
