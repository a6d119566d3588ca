"""Linear layers with weights of 4 bits, kept in the layout of AWQ checkpoints (Lin et al., 2023; "GEMM" order).

I inputs and O outputs of a layer, G inputs of a group that share a scale and a zero point. A weight is (q - z) * scale
with q and z from 0 to 15. Words of 32 bits hold 8 of them, of neighbouring outputs.
"""

import functools
import threading
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .axes import Part, axis
from .kernels import fast_paths_enabled, is_transformed
from .quantized_kernels import Kernel, has_kernel

# The lowest 4 bits of each half of a word are two neighbours; the next 4 bits the next two, and so on.
_SHIFTS = (0, 4, 8, 12)
_TWO = 0x000F000F
# With these bits above it, a number q of 4 bits in 16 is a floating-point number: 128 + q, or 1,024 + q.
_ABOVE = {torch.bfloat16: (0x43004300, 128), torch.float16: (0x64006400, 1024)}
# So many rows are multiplied by the packed weights; for more it is quicker to make plain ones of them first.
_MOST_ROWS = 32
# What PyTorch's 4-bit product takes.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False, repr=False)
class LinearFields(Part):
    """How the linear layers of attention and of the feed-forward network keep their weights."""

    linear_bits: int | None = axis(
        None,
        "4, or None for plain weights",
        "weights",
        "the layers' linear maps keep 4-bit weights, which do not learn",
    )
    linear_group_size: int = axis(
        128, "a positive integer, or -1", "weights", "inputs of a 4-bit map that share a scale; -1 means all of them"
    )

    def check(self):
        """The inputs of every linear map come in whole groups, its outputs in words of 8."""
        super().check()
        if self.linear_bits is None:
            return
        group, key_heads = self.linear_group_size, self.num_key_value_heads * self.head_dim
        inputs = {
            "hidden_size": self.hidden_size,
            "num_attention_heads * head_dim": self.num_attention_heads * self.head_dim,
            "intermediate_size": self.intermediate_size,
        }
        for name, size in inputs.items():
            if group != -1 and size % group:
                raise ValueError(
                    f"{name} ({size}) is not a multiple of linear_group_size ({group}): change one of them."
                )
        for name, size in {**inputs, "num_key_value_heads * head_dim": key_heads}.items():
            if size % 8:
                raise ValueError(f"{name} ({size}) is not a multiple of 8: linear_bits=4 keeps 8 numbers in a word.")
        if self.float32_down_proj:
            raise ValueError("float32_down_proj=True contradicts linear_bits=4: the down projections have 4 bits.")


def _raised(words, dtype):
    """Words, int32 [R, O / 8] -> their numbers, all raised by the same, [R, O], in bfloat16 or float16."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    pairs = words[..., None] >> shifts  # two 16-bit integers in one word, and other bits
    pairs &= _TWO
    pairs |= _ABOVE[dtype][0]
    return pairs.view(dtype).flatten(-2)


def unpack(words):
    """Words, int32 [R, O / 8] -> their numbers from 0 to 15, float16 [R, O]."""
    return _raised(words, torch.float16).sub_(_ABOVE[torch.float16][1])


def pack(numbers):
    """Numbers from 0 to 15, [R, O] of any dtype -> words, int32 [R, O / 8]; the way back of `unpack`."""
    pairs = numbers.to(torch.int32).unflatten(-1, (-1, 4, 2))
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=numbers.device)
    return ((pairs[..., 0] | (pairs[..., 1] << 16)) << shifts).sum(-1, dtype=torch.int32)


def dequantize(qweight, qzeros, scales, dtype):
    """(q - z) * scale.

    Args:
        qweight: int32 [I, O / 8].
        qzeros: int32 [I / G, O / 8].
        scales: [I / G, O].
        dtype: of the result; the product is rounded once, in bfloat16 the scale too.

    Returns:
        The transposed weight [I, O].
    """
    narrow = torch.bfloat16 if dtype is torch.bfloat16 else torch.float16
    numbers = _raised(qweight, narrow).unflatten(0, (len(scales), -1))  # [I / G, G, O]
    numbers = numbers.sub_(_raised(qzeros, narrow)[:, None]).to(dtype)  # q - z, exactly
    return numbers.mul_(scales.to(dtype)[:, None]).flatten(0, 1)


class QuantizedLinear(nn.Linear):
    """y = x W^T + b with a W of 4 bits, which does not learn; gradients reach x and b.

    The state dict has the official names: `qweight` int32 [I, O / 8], `qzeros` int32 [I / G, O / 8], `scales` float16
    [I / G, O] and, perhaps, `bias` [O]. The three keep their dtypes, whatever the model is cast to. A second copy of
    the integers is made at the first call that can use it: on a CPU with few rows, in the layout that PyTorch's 4-bit
    product reads; on a GPU without gradients, as a kernel of gptqmodel reads them, where that package is installed.

    Shapes: [..., I] -> [..., O].
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool, group_size: int):
        nn.Module.__init__(self)
        groups = 1 if group_size == -1 else in_features // group_size
        self.in_features, self.out_features, self.group_size = in_features, out_features, in_features // groups
        self.register_buffer("qweight", torch.zeros(in_features, out_features // 8, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(groups, out_features // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(groups, out_features, dtype=torch.float16))
        self.register_parameter("weight", None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)
        self._packed: _Copy | None = None

    def forward(self, states):
        if torch.is_autocast_enabled(states.device.type):
            states = states.to(torch.get_autocast_dtype(states.device.type))
        if not fast_paths_enabled() or is_transformed():
            return self._plain_product(states)
        if torch.is_grad_enabled() and states.requires_grad:
            return _Product.apply(states, self.bias, self)
        product = self._quick_product(states)
        if product is None:
            return self._plain_product(states)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def _plain_product(self, states):
        if states.dtype is torch.float16 and states.device.type == "cpu":  # many times as slow there as float32
            bias = None if self.bias is None else self.bias.float()
            weight = self.dequantized(torch.float16).float()
            return F.linear(states.float(), weight.t(), bias).to(torch.float16)
        return F.linear(states, self.dequantized(states.dtype).t(), self.bias)

    def dequantized(self, dtype):
        """The transposed weight, [I, O]."""
        return dequantize(self.qweight, self.qzeros, self.scales, dtype)

    def extra_repr(self):
        return f"{super().extra_repr()}, bits=4, group_size={self.group_size}"

    def _quick_product(self, states):
        """The product by a second copy of the weights, less the bias; None where there is none."""
        kind: tuple
        if _is_visited(self):
            return None
        if has_kernel(self, states):
            kind = (Kernel, states.dtype)
        elif self._is_for_packed(states):
            kind = (_Packed,)
        else:
            return None
        copy = self._packed
        if copy is None or not copy.is_of((self,), kind):
            with _lock:
                if self._packed is None or not self._packed.is_of((self,), kind):
                    self._packed = _Copy((self,), kind)
                copy = self._packed
        return copy.made.product(states)

    def _is_for_packed(self, states) -> bool:
        rows = states.numel() // self.in_features
        is_on_cpu = states.device.type == self.qweight.device.type == "cpu" and states.dtype in _DTYPES
        return is_on_cpu and 0 < rows <= _MOST_ROWS and _has_product(self.group_size, self.out_features)

    def _apply(self, fn, recurse=True):
        scales, self._packed = self.scales, None
        super()._apply(fn, recurse)
        if self.scales.dtype is not scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self

    def __getstate__(self):
        return {**self.__dict__, "_packed": None}


class _Copy:
    """Weights of layers a second time, as a quicker product reads them.

    Args:
        layers: one, or several of the same inputs whose products are to be one.
        kind: a class of such products, and what its instances are made of besides the layers.
    """

    def __init__(self, layers: tuple[QuantizedLinear, ...], kind: tuple):
        self.kind, self.identities = kind, [_identity(layer) for layer in layers]
        # Held, so that no other tensor takes their place.
        self.sources = [(layer.qweight, layer.qzeros, layer.scales) for layer in layers]
        self.made = kind[0](*layers, *kind[1:])

    def is_of(self, layers: tuple[QuantizedLinear, ...], kind: tuple) -> bool:
        """Whether it is of this kind, and the layers' integers are still those that it was made of."""
        return self.kind == kind and self.identities == [_identity(layer) for layer in layers]


def _identity(layer) -> list:
    tensors = (layer.qweight, layer.qzeros, layer.scales)
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


def _is_visited(layer) -> bool:
    """Whether the weights are brought for each call and leave after it: accelerate's offloading, DataParallel.

    A copy of them would be made at every call, and stay behind.
    """
    own = vars(layer)
    hook = own.get("_hf_hook")
    return "_is_replica" in own or any(getattr(each, "offload", False) for each in getattr(hook, "hooks", [hook]))


class _Packed:
    """The weights of layers, one after the other, as PyTorch's 4-bit product on a CPU reads them."""

    def __init__(self, *layers: QuantizedLinear):
        with torch.autocast("cpu", enabled=False):  # it does not know float16
            numbers, zeros, scales = (
                torch.cat([getattr(layer, name) for layer in layers], dim=1) for name in ("qweight", "qzeros", "scales")
            )
        numbers = unpack(numbers).t().to(torch.int32)  # [O, I]
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.contiguous(), 1)
        self.group_size = layers[0].group_size
        # The product takes each number less 8 times the scale, plus a zero term.
        scales = scales.float()
        table = torch.stack([scales, (8 - unpack(zeros).float()) * scales], dim=-1)
        self._tables = {torch.float32: table}  # by the dtype of the states

    def product(self, states):
        rows, table = states.reshape(-1, states.shape[-1]).contiguous(), self._tables.get(states.dtype)
        if table is None:
            table = self._tables[states.dtype] = self._tables[torch.float32].to(states.dtype)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, self.group_size, table)
        return product.view(*states.shape[:-1], -1)


class JointlyPacked:
    """The packed weights of some layers as one. The layers make none of their own unless they are called alone."""

    def __init__(self, layers: tuple[QuantizedLinear, ...]):
        self._layers, self._copy = layers, _Copy(layers, (_Packed,))
        for layer in layers:
            layer._packed = None

    @staticmethod
    def is_there_for(layers) -> bool:
        """Whether PyTorch's 4-bit product takes these layers together."""
        kinds = {(layer.in_features, layer.group_size, layer.qweight.device.type) for layer in layers}
        if len(kinds) != 1 or any(map(_is_visited, layers)) or layers[0].qweight.device.type != "cpu":
            return False
        return _has_product(layers[0].group_size, sum(layer.out_features for layer in layers))

    def is_current(self) -> bool:
        """Whether the layers' integers are still those that were packed."""
        return self._copy.is_of(self._layers, (_Packed,))

    def takes(self, states) -> bool:
        """Whether the states are of few rows."""
        is_few = 0 < states.shape[:-1].numel() <= _MOST_ROWS
        return is_few and states.device.type == "cpu" and states.dtype in _DTYPES

    def product(self, states, bias):
        """[..., I] -> [..., O of all layers]."""
        product = self._copy.made.product(states)
        return product if bias is None else product + bias.to(product.dtype)


@functools.cache
@torch.no_grad()
def _has_product(group_size: int, out_features: int) -> bool:
    """Whether PyTorch's 4-bit product is there for such layers, and agrees with plain weights on a small one."""
    if group_size not in (32, 64, 128, 256) or out_features % 16:
        return False
    try:
        # Whatever default device or autocast the first call of a process comes under
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            generator = torch.Generator().manual_seed(0)  # not the global one, by which the user draws
            numbers = [torch.randint(16, (rows, 16), generator=generator) for rows in (2 * group_size, 2)]
            layer = QuantizedLinear(2 * group_size, 16, False, group_size)
            layer.qweight, layer.qzeros = (pack(part) for part in numbers)
            states = torch.randn(2, 2 * group_size, generator=generator)
            return torch.allclose(_Packed(layer).product(states), states @ layer.dequantized(torch.float32), atol=1e-2)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


class _Product(torch.autograd.Function):
    """x W^T of a weight that does not learn and is made anew for the way back: no plain weight is kept meanwhile."""

    @staticmethod
    def forward(ctx, states, bias, layer):
        ctx.layer = layer
        return layer._plain_product(states)

    @staticmethod
    def backward(ctx, grad):
        rows = grad.flatten(0, -2)
        return grad @ ctx.layer.dequantized(grad.dtype).t(), rows.sum(0) if ctx.needs_input_grad[1] else None, None


_lock = threading.Lock()


def make_linear(config, in_features: int, out_features: int, bias: bool) -> nn.Linear:
    """A linear layer as the config wants the layers' weights: plain, or with 4 bits."""
    if config.linear_bits is None:
        return nn.Linear(in_features, out_features, bias=bias)
    return QuantizedLinear(in_features, out_features, bias, config.linear_group_size)
