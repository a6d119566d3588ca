"""Logits that a user's own code computed, against what the written checkpoint computes."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from blockformer.files.config_file import is_ours, read_config
from blockformer.files.errors import ConversionError, shown
from blockformer.files.quiet import quiet
from blockformer.model_classes import MODELS

LARGEST = 1e-3
"""The largest difference of logits in float32, of the largest logit, that another order of sums may make."""
LARGEST_IN_16_BITS = 5e-2
"""The same, of logits that were computed in bfloat16 or float16."""


def compared_logits(folder: Path, path: str) -> str:
    """Run the model in a folder and compare its logits. Returns a sentence on them for the report.

    Args:
        folder: has a whole checkpoint.
        path: a safetensors file with `input_ids` [B, T] and `logits` [B, T, V], and perhaps `attention_mask` [B, T].

    Raises:
        ConversionError: the file lacks them, or the model computes others.
    """
    given = _given(path)
    logits = given.pop("logits")
    config = read_config(folder / "config.json")
    name = str((config.get("architectures") or [""])[0])
    model_class = MODELS.get(name) if is_ours(config) else getattr(transformers, name, None)
    if model_class is None:
        raise ConversionError(f"{path}: cannot be compared: the config names no class, architectures is {shown(name)}")
    with quiet(), torch.no_grad():
        model = model_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        found = getattr(model(**{name: each.long() for name, each in given.items()}), "logits", None)
    if found is None or found.shape != logits.shape:
        have = None if found is None else list(found.shape)
        raise ConversionError(f"{path}: logits are {list(logits.shape)}, but {name} computes {have}")
    largest = logits.double().abs().max().item()
    difference = (found.double() - logits.double()).abs().max().item() / (largest or 1.0)
    said = f"logits of {name} differ by {difference:.1e} of the largest from those in {path}"
    bound = LARGEST if logits.dtype in (torch.float32, torch.float64) else LARGEST_IN_16_BITS
    if not difference <= bound:
        raise ConversionError(
            f"{said}: it is not the same model. Check what shapes do not show: the order of rows in joined matrices "
            "and of rotated pairs, positions and their base, the epsilon of norms, the activation, where norms are"
        )
    return said


def _given(path: str) -> dict[str, Tensor]:
    try:
        given = load_file(path)
    except Exception as error:  # of a damaged file the library raises nearly anything
        raise ConversionError(f"{path}: not a safetensors file: {shown(error)}") from error
    wanted = {"input_ids": 2, "logits": 3}
    lacks = [name for name, axes in wanted.items() if name not in given or given[name].dim() != axes]
    if lacks or not given["logits"].is_floating_point() or given["input_ids"].is_floating_point():
        raise ConversionError(f"{path}: needs input_ids [B, T], whole numbers, and logits [B, T, V] of your own code")
    return {name: each for name, each in given.items() if name in (*wanted, "attention_mask")}
