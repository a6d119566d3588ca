"""Converted weights in a folder of the user's, from which a model reads them that does not fit into memory."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, shown
from blockformer.files.new_repo import RepoOptions
from blockformer.publishing.write_repo import note_on_values

from .plan import Plan
from .writing import CheckpointWeights

PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")
"""The words that transformers takes as a `device_map`."""


def written_weights(checkpoint: Checkpoint, plan: Plan, place: str | PathLike[str], notes: list[str]) -> str:
    """A new folder with the converted weights, in the one for weights that do not fit into memory."""
    Path(place).mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="blockformer-", dir=place)
    with removed_on_failure(folder):
        weights = CheckpointWeights(checkpoint, plan.groups, plan.tied)
        notes += note_on_values(weights.name, weights.planned(), weights.write(Path(folder), RepoOptions()))
        Path(folder, "config.json").write_text(plan.config_json, encoding="utf-8")
        checkpoint.check_unchanged()
    return folder


@contextmanager
def removed_on_failure(folder: str | None) -> Iterator[None]:
    """Remove a folder of weights if the block fails, since nobody will use them."""
    try:
        yield
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def check_device_map(device_map: Any) -> None:
    """Refuse a name that transformers would refuse only when the weights are written."""
    if isinstance(device_map, str) and device_map not in PLACEMENTS:
        try:
            torch.device(device_map)
        except RuntimeError as error:
            known = ", ".join(PLACEMENTS)
            raise ConversionError(
                f"device_map is {shown(device_map)}; it must be one of {known}, a device such as 'cuda:0', or a dict"
            ) from error
