"""What `config.json` tells of quantized weights, compared with the tensors that are there."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from .errors import ConversionError, listed, shown
from .safetensors_io import HasHeader

FIELDS = ("quantization_config", "compression_config")
"""Entries of an official `config.json`; one that is empty is none."""
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
REMEDY = (
    "conversion reads AWQ with 4 bits, MXFP4 of gpt-oss and FP8 in blocks of 128 x 128; of others make plain weights "
    "with dequantize() of transformers, and convert those"
)
"""For weights that are quantized in another way."""


def without_empty(official: Mapping[str, Any]) -> dict[str, Any]:
    """The entries without those of `FIELDS` that are empty, which transformers refuses to load."""
    return {name: value for name, value in official.items() if name not in FIELDS or value}


def check_plain(official: Mapping[str, Any], tensors: Mapping[str, HasHeader]) -> None:
    """Refuse a `config.json` that tells of quantized weights where all are plain, as merging adapters leaves it.

    Raises:
        ConversionError: it does; it says which entry to remove.
    """
    told = [name for name in FIELDS if official.get(name)]
    if told and all(info.dtype in PLAIN for info in tensors.values()):
        method = official[told[0]].get("quant_method") if isinstance(official[told[0]], Mapping) else None
        kinds = [f"{shown(name)} is {str(info.dtype).removeprefix('torch.')}" for name, info in tensors.items()]
        raise ConversionError(
            f"config.json: {told[0]} is for weights quantized by {shown(method)}, but all weights are plain: the "
            f"model was merged or dequantized, so remove {told[0]} from config.json:{listed(kinds)}"
        )


def packed_by_mlx(tensors: Mapping[str, HasHeader]) -> tuple[str, str] | None:
    """The sentence on weights that MLX has packed, and the remedy; None if none are: integers, scales and biases."""
    stems = [name.removesuffix("weight") for name, info in tensors.items() if info.dtype is torch.uint32]
    packed = [stem for stem in stems if {f"{stem}scales", f"{stem}biases"} <= {*tensors}]
    if not packed:
        return None
    fix = "make plain ones with mlx_lm.convert --dequantize, or take the checkpoint that it was converted from"
    return f"MLX has packed {len(packed)} of the weights in few bits ({shown(packed[0] + 'weight')})", fix


def quantized_by_names(names: Collection[str]) -> tuple[str, str] | None:
    """The sentence on weights that a library has quantized, by the names of what it keeps for each, and the remedy.

    Args:
        names: of all tensors.
    """
    for endings, method in QUANTIZED:
        found = [name for name in names if endings[0] in name]
        if found and all(any(ending in name for name in names) for ending in endings):
            said = f"the weights are quantized by {method} ({shown(found[0])}), and config.json has no {FIELDS[0]}"
            return said, f"put {FIELDS[0]} back as it was written with them, or take the plain weights"
    return None


QUANTIZED = (
    ((".quant_state.bitsandbytes__",), "bitsandbytes in 4 bits"),
    ((".SCB",), "bitsandbytes in 8 bits"),
    ((".qweight", ".qzeros", ".g_idx"), "GPTQ"),
    ((".qweight", ".qzeros"), "AWQ or GPTQ"),
    ((".weight_packed", ".weight_scale"), "compressed-tensors"),
    ((".weight_scale_inv",), "FP8 in blocks"),
)
"""Parts of names that stand only in weights of a method -> the method."""


def refuse_quantized(entries: Mapping[str, Any], tensors: Mapping[str, HasHeader]) -> None:
    """Refuse a repo of ours whose weights a library has quantized, or whose `config.json` says so.

    Raises:
        ConversionError: it says what to do.
    """
    check_plain(entries, tensors)
    if told := [name for name in FIELDS if entries.get(name)]:
        method = entries[told[0]].get("quant_method") if isinstance(entries[told[0]], Mapping) else None
        raise ConversionError(
            f"config.json: {told[0]}: the weights are quantized by {shown(method)}, which only loading reads; make "
            "plain ones with dequantize() of transformers, or take the repo from before"
        )
