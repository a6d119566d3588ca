"""oneDNN's products, and the layout in which it multiplies a weight fastest: each used where it is measured quicker.

I inputs and O outputs of a linear layer.
"""

import functools
import weakref

import torch
from torch.nn import functional as F

from .measure import is_measured, is_quicker, random_matrix

# The number of rows that a layout is for. In float32 the one for a single row is slower than this one, with any number.
_ROWS = {torch.bfloat16: 1, torch.float32: 16}
_TOLERANCES = {torch.bfloat16: (0.02, 0.02), torch.float32: (1e-4, 1e-3)}  # of its products, relative and absolute


def product(states, weight, bias=None):
    """`F.linear` [..., I] -> [..., O] of a plain weight [O, I], or of a packed one."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def packed(weight):
    """A matrix [O, I], bfloat16 or float32, in oneDNN's own layout; `to_dense` gives it back bit for bit."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS[weight.dtype])


def is_quicker_in_float32() -> bool:
    """Whether oneDNN's float32 product of many rows exists, is correct, and is faster than PyTorch's own."""
    return is_measured("onednn", _measure_plain)


@torch.no_grad()
def can_pack(dtype) -> bool:
    """Whether this PyTorch has oneDNN's layout for the dtype, tried with a small matrix."""
    try:
        small = torch.ones(8, 8, dtype=dtype, device="cpu")
        product(small, packed(small))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def is_quicker_packed(dtype) -> bool:
    """Whether packed weights of this dtype are multiplied faster than plain ones."""
    return dtype in _ROWS and is_measured(f"packed, {dtype}", functools.partial(_measure_packed, dtype))


_copies: dict[int, torch.Tensor] = {}  # packed weights, by the address of the plain ones


class PackedCopy:
    """A weight in oneDNN's layout next to the plain one, by which `product_by_copy` multiplies.

    Args:
        layer: a linear layer of float32.
    """

    def __init__(self, layer):
        self.layers, self.holders = (layer,), [(layer._parameters, "weight")]
        self._held: list = []  # the address, and the copy
        weakref.finalize(self, _forget, self._held).atexit = False

    def make(self) -> None:
        """Pack the weight."""
        weight = self.layers[0].weight
        _forget(self._held)
        self._held[:] = weight.data_ptr(), packed(weight)
        _copies[self._held[0]] = self._held[1]

    def buffers(self) -> list[torch.Tensor]:
        """The copy, once there is one."""
        return self._held[1:]


def _forget(held: list) -> None:
    if held and _copies.get(held[0]) is held[1]:
        del _copies[held[0]]


@torch.library.custom_op("blockformer::product_by_copy", mutates_args=())
def product_by_copy(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`product` of states [..., I] by the packed copy of a weight [O, I] -> [..., O].

    It is an operator, so that compiled code, which takes plain tensors only, can call it.
    """
    return product(states, _copies.get(weight.data_ptr(), weight), bias)


@product_by_copy.register_fake
def _(states, weight, bias):
    return states.new_empty(*states.shape[:-1], weight.shape[0])


@torch.no_grad()
def _measure_plain() -> bool:
    """This takes one or two tenths of a second."""
    states, weight = random_matrix(64, 1024), random_matrix(3072, 1024)
    try:
        if not torch.allclose(product(states, weight), F.linear(states, weight), *_TOLERANCES[torch.float32]):
            return False
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return is_quicker(lambda: product(states, weight), lambda: F.linear(states, weight), rounds=5, share=0.8)


@torch.no_grad()
def _measure_packed(dtype) -> bool:
    """Few rows times matrices too large for any cache; this takes a few tenths of a second."""
    if not can_pack(dtype):
        return False
    is_float = dtype is torch.float32
    weight, states = random_matrix(3072, 1024).to(dtype), random_matrix(4 if is_float else 1, 1024).to(dtype)
    weights = [weight.clone() for _ in range(8 if is_float else 16)]  # 96 MiB

    def by(multiply, kept):
        return lambda: [multiply(states, each) for each in kept]

    work, others = by(product, [packed(each) for each in weights]), [by(F.linear, weights)]
    if is_float and is_quicker_in_float32():
        others.append(by(product, weights))
    if not torch.allclose(work()[0], others[0]()[0], *_TOLERANCES[dtype]):
        return False
    # Where the layout helps, it takes two thirds of the time; what is nearer may be slower for other sizes.
    return all(is_quicker(work, other, rounds=12, share=0.85) for other in others)
