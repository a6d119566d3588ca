"""The product of one row, written out for the compiler.

A call of a library's product costs microseconds, and for one row a small layer takes no longer than that. Written out,
products are loops like any other, and the compiler puts them into one kernel with the norms and activations around
them. In 16 bits its loops also beat the libraries' at any size.
"""

import torch

# Float32 weights from which a library's product reads memory as fast as a loop does.
_MANY_WEIGHTS = 1 << 21


def with_one_row_products(program):
    """An exported program (`torch.export`) whose linear layers of one row are loops."""
    return program.run_decompositions({torch.ops.aten.linear.default: _product})


def _product(states, weight, bias=None):
    """`F.linear` of states [..., I] that are one row, weight [O, I]; summed in float32."""
    is_one = all(type(size) is int and size == 1 for size in states.shape[:-1])
    is_large = weight.dtype is torch.float32 and weight.numel() >= _MANY_WEIGHTS
    if not is_one or is_large or weight.dtype is torch.float64:
        return NotImplemented
    output = (weight.float() * computed_once(states.reshape(-1))).sum(-1)
    output = output if bias is None else output + bias.float()
    return output.to(states.dtype).reshape(*states.shape[:-1], -1)


def computed_once(states):
    """States of any shape in float32, which the compiler computes once, and not anew for each output of a product."""
    states = states.float().contiguous()
    return states.as_strided(states.shape, states.stride())
