"""Weights of 8 bits (E4M3) with factors: one for each block of 128 rows and 128 columns (DeepSeek, Qwen3, MiniMax-M2),
one for each row, or one for the whole matrix (Devstral 2).

transformers and compressed-tensors, which vLLM's tools use, write them under different names. Any family may have
them: its rules see plain weights, in bfloat16. N outputs, K inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError, listed, shown

from ..rules.groups import Group, Target
from ..rules.operations import Shape
from .low_bits import FIELD, LowBitFormat, wrong_entries

WEIGHT = torch.float8_e4m3fn
FACTORS = (torch.float32, torch.bfloat16, torch.float16, getattr(torch, "float8_e8m0fnu", torch.float32))
BLOCK = 128
_WANTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "weight_block_size": ([BLOCK, BLOCK], None),
    "scale_fmt": ("float", "ue8m0", None),  # powers of two, which DeepSeek-V3.1 stores in float32
    "expert_dtype": ("fp8", None),
    "activation_scheme": ("dynamic", "static", None),
}
_FREE = ("dequantize", "modules_to_not_convert", "ignored_layers", "modules_to_convert")
"""The tensors say which weights have 8 bits."""
_COMPRESSED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "quantization_status": ("compressed", "frozen", None),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None,),
    "transform_config": (None, {}),
}
_OF_A_GROUP: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True, None),
    "strategy": ("tensor", "channel", "block"),
    "block_structure": (None, [BLOCK, BLOCK]),
}


@dataclass(frozen=True)
class Fp8:
    """A weight [N, K] and its factors, [N / 128, K / 128] rounded up, [N, 1] or a single one -> plain, in bfloat16.

    A third tensor, the scale of the inputs, is not read. Such weights are not written.
    """

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        weight, scales, *_ = tensors
        factors, (rows, columns) = scales.float(), weight.shape
        if factors.dim() == 2 and factors.shape != (rows, 1):
            factors = factors.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return [(weight.float() * factors).bfloat16()]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        weight, scales, *_ = shapes
        blocks = tuple(-(-size // BLOCK) for size in weight)
        if len(weight) != 2 or tuple(scales) not in ((), (1,), (weight[0], 1), blocks):
            said = f"a weight {list(weight)} and factors {list(scales)} are not FP8 weights"
            raise ConversionError(f"{said} in blocks of {BLOCK} x {BLOCK}, nor with one factor, nor with one a row")
        return [tuple(weight)]


class _Fp8(LowBitFormat):
    """Matrices of 8 bits, which become bfloat16.

    Attributes:
        inputs: how the name of the factor for a matrix's inputs ends, if these have 8 bits too. It is not read.
    """

    method, ending, stored = "fp8", "_scale_inv", WEIGHT
    inputs = "activation_scale"
    note = "the FP8 weights have become bfloat16; the way back writes bfloat16 too"
    note_on_paper = "the weights are stored in FP8; conversion makes bfloat16 of them"

    def check(self, official):
        entries = official.get(FIELD)
        if not isinstance(entries, Mapping):
            said = "is missing, and there are FP8 weights; copy it from the original"
            raise ConversionError(f"config.json: {FIELD} {said}")
        if wrong := wrong_entries(entries, _WANTED, _FREE):
            raise ConversionError(f"config.json: {FIELD}: FP8 weights of this kind cannot be converted:{listed(wrong)}")

    def groups(self, tensors, dtype):
        wrong, groups = [], []
        for name in (name for name in tensors if name + self.ending in tensors):
            weight, factors = tensors[name], tensors[name + self.ending]
            if weight.dtype is not WEIGHT or factors.dtype not in FACTORS:
                wrong.append(f"{shown(name)} is {weight.dtype}, its factors are {factors.dtype}")
                continue
            try:
                (shape,) = Fp8().forward_shapes([tuple(weight.shape), tuple(factors.shape)])
            except ConversionError as error:
                wrong.append(f"{shown(name)}: {error}")
                continue
            inputs = name.removesuffix("weight") + self.inputs
            parts = (name, name + self.ending, *([inputs] if inputs in tensors else []))
            groups.append(Group(parts, (Target(name, torch.bfloat16, shape),), Fp8()))
        if wrong:
            raise ConversionError(f"FP8 weights that cannot be converted ({len(wrong)}):{listed(wrong)}")
        return groups


class _Compressed(_Fp8):
    """FP8 weights as compressed-tensors writes them. Its other formats are not read."""

    method, ending, inputs = "compressed-tensors", "_scale", "input_scale"

    def is_told(self, official):
        return super().is_told(official) and official[FIELD].get("format") in ("float-quantized", "naive-quantized")

    def is_there(self, official, names):
        return self.is_told(official) and super().is_there(official, names)

    def check(self, official):
        entries = official[FIELD]
        groups = entries.get("config_groups")
        free = ("format", "config_groups", "ignore", "global_compression_ratio", "version")
        wrong = wrong_entries(entries, _COMPRESSED, free)
        for each in groups.values() if isinstance(groups, Mapping) else ():
            weights = each.get("weights") if isinstance(each, Mapping) else None
            weights = weights if isinstance(weights, Mapping) else {}
            wrong += wrong_entries(weights, _OF_A_GROUP, [*weights])
        if wrong:
            raise ConversionError(f"config.json: {FIELD}: FP8 weights of this kind cannot be converted:{listed(wrong)}")


FP8, COMPRESSED_FP8 = _Fp8(), _Compressed()
