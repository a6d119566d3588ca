"""Linear layers with weights of 4 bits, stored in the layout of AWQ checkpoints (Lin et al., 2023; "GEMM" order).

I inputs and O outputs of a layer, G inputs of a group that share a scale and a zero point. A weight is (q - z) * scale
with q and z from 0 to 15. Words of 32 bits hold 8 of them, of neighbouring outputs.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .axes import Part, axis

# The lowest 4 bits of each half of a word are two neighbours; the next 4 bits the next two, and so on.
SHIFTS = (0, 4, 8, 12)
_TWO = 0x000F000F
# With these bits above it, a number q of 4 bits in 16 is a floating-point number: 128 + q, or 1,024 + q.
ABOVE = {torch.bfloat16: (0x43004300, 128), torch.float16: (0x64006400, 1024)}
# In these a CPU multiplies by a transposed weight many times as slowly as in float32.
_SLOW_ON_CPU = {torch.float16}
if torch.backends.cpu.get_cpu_capability() != "AVX512":
    _SLOW_ON_CPU.add(torch.bfloat16)


@dataclass(eq=False, repr=False)
class LinearFields(Part):
    """How the linear layers of attention and of the feed-forward network keep their weights."""

    linear_bits: int | None = axis(
        None, "4, or None for plain weights", "weights", "linear layers keep 4-bit weights, which do not train"
    )
    linear_group_size: int = axis(
        128, "a positive integer, or -1", "weights", "inputs of a 4-bit layer that share a scale; -1 means all"
    )

    def check(self):
        """The inputs of every linear map come in whole groups, its outputs in words of 8."""
        if self.linear_bits is None:
            return
        heads, keys = (count * self.head_dim for count in (self.num_attention_heads, self.num_key_value_heads))
        inputs = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        inputs["num_attention_heads * head_dim"], group = heads, self.linear_group_size
        for name, size in inputs.items():
            if group != -1 and size % group:
                raise ValueError(f"{name} ({size}) is not a multiple of linear_group_size ({group}): change one.")
        for name, size in {**inputs, "num_key_value_heads * head_dim": keys}.items():
            if size % 8:
                raise ValueError(f"{name} ({size}) is not a multiple of 8: linear_bits=4 keeps 8 numbers in a word.")
        if self.float32_down_proj or self.pruned_heads:
            raise ValueError("linear_bits=4 is not supported with float32_down_proj or pruned_heads: drop one of them.")

    def keep_in_low_bits(self, layers):
        """Have every linear map of the layers keep its weights in as many bits as the config says."""
        for parent in list(layers.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, nn.Linear):
                    sizes = (layer.in_features, layer.out_features, layer.bias is not None)
                    setattr(parent, name, QuantizedLinear(*sizes, self.linear_group_size))


def raised(words, dtype):
    """Words, int32 [R, O / 8] -> their numbers, all raised by the same, [R, O], in bfloat16 or float16."""
    shifts = SHIFTS[1] * torch.arange(len(SHIFTS), dtype=torch.int32, device=words.device)  # no copy from the host
    pairs = words[..., None] >> shifts  # two 16-bit integers in one word, and other bits
    pairs &= _TWO
    pairs |= ABOVE[dtype][0]
    return pairs.view(dtype).flatten(-2)


def dequantize(qweight, qzeros, scales, dtype):
    """The transposed weight [I, O], (q - z) * scale, rounded once; in bfloat16 the scale is rounded too.

    The integers are words, int32 [I, O / 8] and [I / G, O / 8], the scales [I / G, O].
    """
    narrow = torch.bfloat16 if dtype is torch.bfloat16 else torch.float16
    numbers = raised(qweight, narrow).unflatten(0, (len(scales), -1))  # [I / G, G, O]
    numbers = numbers.sub_(raised(qzeros, narrow)[:, None]).to(dtype)  # q - z, exactly
    return numbers.mul_(scales.to(dtype)[:, None]).flatten(0, 1)


class QuantizedLinear(nn.Linear):
    """y = x W^T + b with a W of 4 bits, which does not learn; gradients reach x and b.

    The state dict has the official names: `qweight` int32 [I, O / 8], `qzeros` int32 [I / G, O / 8], `scales` float16
    [I / G, O] and, perhaps, `bias` [O]. The three keep their dtypes, whatever the model is cast to. Each call makes
    plain weights and multiplies by them.

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

    def forward(self, states):
        device = states.device.type
        if torch.is_autocast_enabled(device):
            states = states.to(torch.get_autocast_dtype(device))
        if torch.is_grad_enabled() and states.requires_grad and not torch.compiler.is_compiling():
            return _Product.apply(states, self.bias, self)
        return self.plain_product(states)

    def plain_product(self, states):
        """`forward` by plain weights, made for this call. [..., I] -> [..., O]."""
        weight = self.dequantized(states.dtype).t()
        if states.device.type != "cpu" or states.dtype not in _SLOW_ON_CPU:
            return F.linear(states, weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(states.float(), weight.float(), bias).to(states.dtype)

    def dequantized(self, dtype):
        """The transposed weight, [I, O]."""
        return dequantize(self.qweight, self.qzeros, self.scales, dtype)

    def after_loading(self, name: str) -> None:
        """Have the buffers of this module, of that name in the model, read in their own dtypes where they are on disk.

        transformers up to 5.12 reads them in the model's dtype: of an int32 word a float32 keeps 24 bits.
        """
        hook = getattr(self, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            weights = getattr(getattr(each, "weights_map", None), "dataset", None)  # of accelerate's AlignDevicesHook
            index = getattr(weights, "index", {})
            for entry, buffer in self.named_buffers(name, recurse=False):
                if entry in index:
                    index[entry]["dtype"] = str(buffer.dtype).removeprefix("torch.")

    def extra_repr(self):
        return f"{super().extra_repr()}, bits=4, group_size={self.group_size}"

    def _apply(self, fn, recurse=True):
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype is not scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self


class _Product(torch.autograd.Function):
    """x W^T of a weight that does not learn. The backward pass makes it again, so that no copy stays in memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(states, bias, layer):
        return layer.plain_product(states)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.layer = inputs[2]

    @staticmethod
    def backward(ctx, grad):
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad @ ctx.layer.dequantized(grad.dtype).t(), grad_bias, None

    @staticmethod
    def jvp(ctx, tangent, bias_tangent, _):
        product = tangent @ ctx.layer.dequantized(tangent.dtype)
        return product if bias_tangent is None else product + bias_tangent
