"""AWQ's "gemm" layout written down by hand, number by number, as the oracle of the 4-bit tests.

Weights [N, K] are quantized plainly: in groups of K, the nearest of 16 levels between the least and the largest.
"""

import numpy as np
import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Bits 4i to 4i + 3 of a word hold the column ORDER[i] of its eight."""


def quantize(weight, group):
    """[N, K] -> numbers q [K, N] and zero points z [K / G, N] from 0 to 15, scales [K / G, N] in float16."""
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    groups = weight.detach().double().t().reshape(-1, group, outputs)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).half()
    zeros = (-low / scales.double()).round().clamp(0, 15)
    numbers = (groups / scales.double()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return numbers.reshape(inputs, outputs).int(), zeros.int(), scales


def words(numbers):
    """[R, N] -> int32 [R, N / 8]."""
    rows, columns = numbers.shape
    made = np.zeros((rows, columns // 8), dtype=np.uint32)
    values = numbers.numpy().astype(np.uint32)
    for place, column in enumerate(ORDER):
        made |= values[:, column::8] << np.uint32(4 * place)
    return torch.from_numpy(made.view(np.int32))


def tensors(weight, group):
    """The three tensors that stand for a weight [N, K], and the weight that they mean, in float32."""
    numbers, zeros, scales = quantize(weight, group)
    size = len(numbers) // len(scales)
    meant = (numbers - zeros.repeat_interleave(size, 0)).double() * scales.double().repeat_interleave(size, 0)
    parts = {"qweight": words(numbers), "qzeros": words(zeros), "scales": scales}
    return parts, meant.float().t().contiguous()


def state_of(model, group):
    """The state dict of a decoder's checkpoint with 4-bit projections, and that of its plain twin."""
    low, plain = {}, {}
    layers = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    for name, tensor in model.state_dict().items():
        plain[name] = tensor
        if name in layers - {*UNTOUCHED, "score.weight"}:
            parts, plain[name] = tensors(tensor, group)
            low |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            low[name] = tensor
    return low, plain


UNTOUCHED = ("lm_head.weight", "output_projection.weight")
"""Language model heads, which AWQ leaves as they are."""
ENTRIES = {
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "exllama_config": None,
    "group_size": 32,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
"""As an official checkpoint has it in its `config.json`."""
