"""`config.json` as all later steps rely on it: types, bounds, and entries that are never followed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError, listed, shown
from .json_files import read_json
from .names import WEIGHT_NAMES, WEIGHTS
from .safetensors_io import TensorInfo

LAYERS = (
    "num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
"""The names families use for the number of layers."""
OURS = "blockformer_"
"""The beginning of our model types."""
MOST = {"num_hidden_layers": 100_000, "num_labels": 4_000_000}
"""More than any model has, and what still takes little memory as a list of names. Our configs refuse more, too."""
MANY_LABELS = 10_000
"""Labels that a config may name even if no tensor has that many rows."""
NEVER_FOLLOWED = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "custom_generate",
    "kernel_config",
)
"""Config entries that can name code to load. They are always dropped."""


_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def with_floats(value: Any) -> Any:
    """A config's entries, in which transformers writes numbers that JSON lacks as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        name = value.get("__float__") if len(value) == 1 else None
        if isinstance(name, str) and name in _FLOATS:
            return _FLOATS[name]
        return {key: with_floats(each) for key, each in value.items()}
    return [with_floats(each) for each in value] if isinstance(value, list) else value


def is_ours(entries: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is in our layout."""
    return str(entries.get("model_type", "")).startswith(OURS)


def read_config(path: Path) -> dict[str, Any]:
    """`config.json`, checked for the types that all later steps rely on.

    Raises:
        CheckpointError: it is not a JSON object, or an entry has the wrong type.
    """
    config = read_json(path, infinite=True)
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(f"{path}: architectures is {shown(names)}; it must be a list of names of classes")
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        known = value is None or (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype))
        if not known and not (isinstance(value, str) and is_ours(config)):  # whose class knows which there are
            raise CheckpointError(
                f"{path}: {name} is {shown(value)}; it must be the name of a dtype, such as 'bfloat16', or left out"
            )
    weights = config.get("transformers_weights")
    if weights is not None and weights not in WEIGHT_NAMES:
        raise CheckpointError(
            f"{path}: transformers_weights is {shown(weights)}; rename that file to {WEIGHTS[0][0]} (an index "
            f"{WEIGHTS[0][1]}) and remove the entry"
        )
    check_bounds(path, config)
    large = [f"{shown(name)}: {shown(value, 40)}" for name, value in config.items() if _has_large_integer(value)]
    if large:
        raise CheckpointError(f"{path}: integers of more than 64 bits:{listed(large)}")
    return config


def _counts(entries: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, str, int]]:
    """The layers and labels that a config names, at any depth: (name with what it is in, name, number)."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _counts(value, f"{inside}{name}.")
        elif type(value) is int and value > 0 and name in (*LAYERS, "num_labels"):
            yield inside + name, name, value


def check_bounds(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse more layers or labels than any model has, before a list or dict of them is made."""
    for place, name, count in _counts(config):
        kind = "num_labels" if name == "num_labels" else "num_hidden_layers"
        if count > MOST[kind]:
            raise CheckpointError(f"{path}: {shown(place)}: {kind} ({count}) must be at most {MOST[kind]:,}.")


def check_tensors(folder: Path, config: Mapping[str, Any], tensors: dict[str, TensorInfo]) -> None:
    """Refuse more layers or labels than the tensors can hold, before such a model is built."""
    labels = max([MANY_LABELS, *(max(info.shape, default=0) for info in tensors.values())])
    for place, name, count in _counts(config):
        limit = labels if name == "num_labels" else len(tensors)
        if count > limit:
            raise CheckpointError(f"{folder / 'config.json'}: {place} is {count}; the tensors can hold {limit}")


def _has_large_integer(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return any(map(_has_large_integer, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) >= 2**63
