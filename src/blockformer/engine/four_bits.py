"""4-bit weights in the layouts of faster products on a CPU.

I inputs and O outputs of a layer, G inputs of a group that share a scale and a zero point.
"""

import functools
import threading
from typing import Any

import torch
from torch.nn import functional as F

from ..model.awq_linear import ABOVE, SHIFTS, QuantizedLinear, raised
from .linear import float32_product
from .measure import is_enabled, is_measured, is_quicker, random_matrix
from .origin import Origin
from .watched import is_transformed

# Up to this many rows are multiplied by the packed weights; with more it is faster to unpack them first
# (benchmarks/thresholds.py, on processors whose product gains at all).
MOST_PACKED_ROWS = 32
_NAMES = ("qweight", "qzeros", "scales")
# What PyTorch's 4-bit product takes.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_lock = threading.Lock()


class PreparedQuantizedLinear(QuantizedLinear):
    """`QuantizedLinear` with faster products. A plain layer becomes one by changing its class.

    The first call of few rows on a CPU makes a copy of the weights, in the layout of PyTorch's 4-bit product.

    Shapes: [..., I] -> [..., O].
    """

    _copy: Any = None

    def forward(self, states):
        if not is_enabled() or is_transformed() or (torch.is_grad_enabled() and states.requires_grad):
            return super().forward(states)
        if torch.is_autocast_enabled(states.device.type):
            states = states.to(torch.get_autocast_dtype(states.device.type))
        product = self._quick_product(states)
        if product is None:
            return self.plain_product(states)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def _multiply(self, states, weight, bias):
        is_float = type(states) is torch.Tensor and states.dtype is torch.float32 and states.device.type == "cpu"
        has_many = states.numel() // self.in_features > MOST_PACKED_ROWS
        is_quick = is_float and has_many and is_enabled() and not is_transformed()
        return (float32_product() if is_quick else F.linear)(states, weight, bias)

    def _quick_product(self, states):
        """The product with a copy of the weights, without the bias; None if there is no such copy."""
        if _is_visiting(self):
            return None
        if not self._is_for_packed(states):
            return None
        copy = self._copy
        if copy is None or not copy.is_current():
            with _lock:
                if self._copy is None or not self._copy.is_current():
                    self._copy = _Packed(self)
                copy = self._copy
        return copy.product(states)

    def _is_for_packed(self, states) -> bool:
        is_there = self._has_few(states) and _has_product(self.group_size, self.out_features)
        return is_there and is_packed_quicker(states.dtype)

    def _has_few(self, states) -> bool:
        is_on_cpu = states.device.type == self.qweight.device.type == "cpu" and states.dtype in _DTYPES
        return is_on_cpu and 0 < states.numel() // self.in_features <= MOST_PACKED_ROWS

    def _apply(self, fn, recurse=True):
        self._copy = None
        return super()._apply(fn, recurse)

    def __getstate__(self):
        return {**self.__dict__, "_copy": None}


def holders_of(*layers: QuantizedLinear) -> list[tuple[dict, str]]:
    """Where layers hold their 4-bit weights, see `Origin`."""
    return [(layer._buffers, name) for layer in layers for name in _NAMES]


def _is_visiting(layer) -> bool:
    """Whether the weights are resident only during a call: accelerate's offloading, DataParallel.

    Otherwise every call would make a copy and leave it behind.
    """
    own = vars(layer)
    hook = own.get("_hf_hook")
    return "_is_replica" in own or any(getattr(each, "offload", False) for each in getattr(hook, "hooks", [hook]))


class _Packed:
    """The weights of a layer as PyTorch's 4-bit product on a CPU reads them."""

    def __init__(self, layer: QuantizedLinear):
        self._holders = holders_of(layer)
        self._origin = Origin(self._holders)
        numbers, zeros, scales = (getattr(layer, name) for name in _NAMES)
        numbers = unpack(numbers).t().to(torch.int32)  # [O, I]
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.contiguous(), 1)
        self.group_size = layer.group_size
        # The product takes each number less 8 times the scale, plus a zero term.
        scales = scales.float()
        table = torch.stack([scales, (8 - unpack(zeros).float()) * scales], dim=-1)
        self._tables = {torch.float32: table}  # by the dtype of the states

    def is_current(self) -> bool:
        """Whether the layer still has the integers that it was made from."""
        return self._origin.is_of(self._holders)

    def product(self, states):
        rows, table = states.reshape(-1, states.shape[-1]).contiguous(), self._tables.get(states.dtype)
        if table is None:
            table = self._tables[states.dtype] = self._tables[torch.float32].to(states.dtype)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, self.group_size, table)
        return product.view(*states.shape[:-1], -1)


@functools.cache
@torch.no_grad()
def _has_product(group_size: int, out_features: int) -> bool:
    """Whether PyTorch's 4-bit product exists for such layers, and agrees with plain weights on a small one."""
    if group_size not in (32, 64, 128, 256) or out_features % 16:
        return False
    try:
        # Whatever default device or autocast is set at the first call of a process
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            generator = torch.Generator().manual_seed(0)  # not the global one, by which the user draws
            numbers = [torch.randint(16, (rows, 16), generator=generator) for rows in (2 * group_size, 2)]
            layer = QuantizedLinear(2 * group_size, 16, False, group_size)
            layer.qweight, layer.qzeros = (pack(part) for part in numbers)
            states = torch.randn(2, 2 * group_size, generator=generator)
            return torch.allclose(_Packed(layer).product(states), states @ layer.dequantized(torch.float32), atol=1e-2)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def is_packed_quicker(dtype) -> bool:
    """Whether PyTorch's 4-bit product of few rows is faster than plain weights made for the call."""
    return is_measured(f"packed 4 bits, {dtype}", functools.partial(_measure_packed, dtype))


@torch.no_grad()
def _measure_packed(dtype) -> bool:
    if not _has_product(128, 1024):
        return False
    with torch.device("cpu"):
        layer = PreparedQuantizedLinear(1024, 1024, False, 128)
        packed, states = _Packed(layer), random_matrix(4, 1024).to(dtype)
    return is_quicker(lambda: packed.product(states), lambda: layer.plain_product(states), 6)


def unpack(words):
    """Words, int32 [R, O / 8] -> their numbers from 0 to 15, float16 [R, O]."""
    return raised(words, torch.float16).sub_(ABOVE[torch.float16][1])


def pack(numbers):
    """Numbers from 0 to 15, [R, O] of any dtype -> words, int32 [R, O / 8]; the way back of `unpack`."""
    pairs = numbers.to(torch.int32).unflatten(-1, (-1, 4, 2))
    shifts = torch.tensor(SHIFTS, dtype=torch.int32, device=numbers.device)
    return ((pairs[..., 0] | (pairs[..., 1] << 16)) << shifts).sum(-1, dtype=torch.int32)
