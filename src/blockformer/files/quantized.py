"""What `config.json` tells of quantized weights, compared with the tensors that are there."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from .errors import ConversionError, listed, shown
from .safetensors_io import HasHeader, torch_name

FIELDS = ("quantization_config", "compression_config")
"""Entries of an official `config.json`."""
OUR_BITS = "linear_bits"
"""The entry of our layout that says the same."""
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are not quantized."""
REMEDY = (
    "conversion reads AWQ with 4 bits, GPTQ, FP8 and integers of compressed-tensors, FP8 of transformers and ModelOpt, "
    "and MXFP4 of gpt-oss; of others make plain weights with dequantize() of transformers, and convert those"
)
"""For weights that are quantized in another way."""


def quantized_entries(entries: Mapping[str, Any]) -> list[str]:
    """The names in `FIELDS` under which there is a method; transformers skips one that is called "none"."""
    return [name for name in FIELDS if entries.get(name) and _method(entries[name]) != "none"]


def with_modelopt(entries: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries with what ModelOpt says of the weights in a file next to them, where they say nothing themselves.

    Args:
        entries: of an official `config.json`.
        settings: the content of that file; {} without one.
    """
    told = settings.get("quantization")
    if not entries or not isinstance(told, Mapping) or quantized_entries(entries):
        return dict(entries)
    return {**entries, FIELDS[0]: {"quant_method": "modelopt", **told}}


def all_plain(tensors: Mapping[str, HasHeader]) -> bool:
    """Whether no tensor has a dtype of weights in few bits."""
    return all(info.dtype in PLAIN for info in tensors.values())


def without_empty(official: Mapping[str, Any]) -> dict[str, Any]:
    """The entries without those in `FIELDS` that name no method; empty ones transformers refuses to load."""
    named = quantized_entries(official)
    return {name: value for name, value in official.items() if name not in FIELDS or name in named}


def check_plain(official: Mapping[str, Any], tensors: Mapping[str, HasHeader]) -> None:
    """Refuse a `config.json` that tells of quantized weights where all are plain, as merging adapters leaves it.

    Raises:
        ConversionError: it does; it says which entry to remove.
    """
    names = quantized_entries(official)
    if names and all_plain(tensors):
        method = _method(official[names[0]])
        kinds = [f"{shown(name)} is {torch_name(info.dtype)}" for name, info in tensors.items()]
        raise ConversionError(
            f"config.json: {names[0]} is for weights quantized by {shown(method)}, but all weights are plain: the "
            f"model was merged or dequantized, so remove {names[0]} from config.json:{listed(kinds)}"
        )


def _method(entry: Any) -> Any:
    """What an entry of `FIELDS` says of how the weights were quantized."""
    return entry.get("quant_method") if isinstance(entry, Mapping) else entry


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
            return said, PUT_BACK
    return None


QUANTIZED = (
    ((".quant_state.bitsandbytes__",), "bitsandbytes in 4 bits"),
    ((".SCB",), "bitsandbytes in 8 bits"),
    ((".qweight", ".qzeros", ".g_idx"), "GPTQ"),
    ((".qweight", ".qzeros"), "AWQ or GPTQ"),
    ((".weight_packed", ".weight_scale"), "compressed-tensors"),
    ((".weight_scale_inv",), "FP8 in blocks"),
    ((".weight_scale_2",), "ModelOpt in NVFP4"),
    ((".W_q",), "HQQ"),
    ((".q_invperm", ".q_scale"), "ExLlamaV2 (EXL2)"),
    ((".trellis", ".suh"), "ExLlamaV3 (EXL3)"),
    (("._data", "._scale"), "Quanto"),
    (("_weight_qdata",), "torchao"),
    (("_blocks", "_scales"), "MXFP4"),
)
"""Parts of names that stand only in weights of a method -> the method."""
EIGHT_BITS = tuple(
    getattr(torch, name)
    for name in ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)
SCALES = ("weight_scale", "weight_scales", "weight.scale", "weight.scales", "scale", "scales", "weights_scaling_factor")
"""Names of the scales of a weight, next to its own."""
FEWEST = 4
"""Matrices of whole numbers that a library must have made; fewer are a separate fault."""


def lost_quantization(tensors: Mapping[str, HasHeader]) -> tuple[str, str] | None:
    """The sentence on quantized weights whose config says nothing of it, and the remedy; None if they are plain.

    Args:
        tensors: name -> header.
    """
    if found := quantized_by_names(tensors):
        return found
    few_bits = {name: info for name, info in tensors.items() if name.endswith(".weight") and info.dtype in EIGHT_BITS}
    for name, info in few_bits.items():
        stem = name.removesuffix("weight")
        if scale := next((f"{stem}{ending}" for ending in SCALES if f"{stem}{ending}" in tensors), None):
            said = f"{len(few_bits)} weights are {torch_name(info.dtype)} with scales ({shown(scale)})"
            return f"{said}, quantized in 8 bits, and config.json has no {FIELDS[0]}", PUT_BACK
    whole = {name: info for name, info in few_bits.items() if not info.dtype.is_floating_point}
    if len(whole) < FEWEST:
        return None
    name, info = next(iter(whole.items()))
    said = f"{len(whole)} weights are {torch_name(info.dtype)} ({shown(name)}): a library has quantized them"
    if all(tuple(each.shape[1:]) == (1,) for each in whole.values()):
        said = f"{said}, as bitsandbytes does in 4 bits"
    return f"{said}, and what it kept with them, such as scales, is lost", LOST


PUT_BACK = f"put {FIELDS[0]} back as it was written with them, or take the plain weights"
LOST = "take the plain weights; a quantized model is saved whole with its own save_pretrained, not by its state dict"


def refuse_quantized(entries: Mapping[str, Any], tensors: Mapping[str, HasHeader]) -> None:
    """Refuse a Blockformer repo whose weights a library has quantized, or whose `config.json` says so.

    Raises:
        ConversionError: it says what to do.
    """
    check_plain(entries, tensors)
    if names := quantized_entries(entries):
        method = _method(entries[names[0]])
        raise ConversionError(
            f"config.json: {names[0]}: the weights are quantized by {shown(method)}, which only loading reads; make "
            "plain ones with dequantize() of transformers, or take the repo from before"
        )
