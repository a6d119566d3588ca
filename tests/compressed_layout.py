"""Whole numbers as compressed-tensors writes them, by hand: numbers, scales, and the words that hold them."""

import torch

ENTRIES = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.20.1",
}


def entries(strategy, symmetric=True, bits=4, group=None, **others):
    """What `config.json` says of such weights."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    weights |= {"actorder": None, "block_structure": None, "dynamic": False, "observer": "memoryless_minmax"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {**ENTRIES, "config_groups": {"group_0": {**scheme, "format": None}}, **others}


def quantize(weight, bits, groups, symmetric):
    """[N, K] -> numbers q [N, K] and zero points z [N, G], signed and of so many bits, and scales [N, G]."""
    parts = weight.float().unflatten(1, (groups, -1))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if symmetric:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scales = ((high - low) / (most - least)).clamp(min=1e-3).to(weight.dtype)
    zeros = torch.zeros_like(low) if symmetric else (least - low / scales.float()).round().clamp(least, most)
    numbers = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(least, most)
    return numbers.flatten(1).int(), zeros.int(), scales


def words(numbers, bits):
    """Signed numbers [R, C] -> int32 [R, C bits / 32], rounded up; the first number has the lowest bits."""
    rows = [
        sum((int(number) + 2 ** (bits - 1)) << (bits * place) for place, number in enumerate(row)) for row in numbers
    ]
    count = -(-numbers.shape[1] * bits // 32)
    split = [[(row >> (32 * place)) & 0xFFFFFFFF for place in range(count)] for row in rows]
    return torch.tensor(split, dtype=torch.int64).to(torch.int32)


def packed(weight, groups, symmetric=True, bits=4):
    """The tensors that stand for a weight [N, K], by the ends of their names; and that weight in the scales' dtype."""
    numbers, zeros, scales = quantize(weight, bits, groups, symmetric)
    parts = {"weight_packed": words(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        parts["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    return parts, meant(numbers, zeros, scales)


def loose(weight, groups, symmetric=True):
    """The same in 8 bits, a byte for each number."""
    numbers, zeros, scales = quantize(weight, 8, groups, symmetric)
    parts = {"weight": numbers.to(torch.int8), "weight_scale": scales}
    return {**parts, **({} if symmetric else {"weight_zero_point": zeros.to(torch.int8)})}, meant(
        numbers, zeros, scales
    )


def meant(numbers, zeros, scales):
    """What they mean: the product rounded once."""
    spread = [each.double().repeat_interleave(numbers.shape[1] // each.shape[1], 1) for each in (zeros, scales)]
    return ((numbers - spread[0]) * spread[1]).to(scales.dtype)
