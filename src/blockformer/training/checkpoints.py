"""Which checkpoint of a run `Trainer` can resume from: one that is complete, with the weights of its config."""

import json
import os
import re
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from ..files.checkpoint import Checkpoint
from ..files.earlier_names import NOT_RESUMED, are_earlier
from ..files.errors import CheckpointError
from ..model.pretrained_model import WeightsError, listed
from ..model_classes import MODELS

logger = logging.get_logger(__name__)


def last_complete_checkpoint(folder: str | os.PathLike) -> str | None:
    """The checkpoint to resume from: the complete one with the highest number.

    `Trainer` writes a checkpoint file by file, its `trainer_state.json` last, and by itself resumes from the highest
    number, complete or not. Here a checkpoint counts if the weights, the optimizer, the schedule, the random states
    and the `Trainer`'s own state are there, and each file is whole: its header or directory fits its length. This also
    covers FSDP, DeepSpeed and adapters. No checksum is computed: that would read every byte.

    Args:
        folder: the `output_dir` of one run; it need not exist.

    Returns:
        For `Trainer.train(resume_from_checkpoint=...)`: a path, or None, with which training starts from scratch. A
        warning names each checkpoint that is skipped.

    Raises:
        WeightsError: the checkpoint's weights do not have the names that its config makes. `Trainer` would resume from
            it with a warning and draw the missing ones at random.
    """
    numbered = [
        (int(match[1]), path)
        for path in (Path(folder).iterdir() if Path(folder).is_dir() else ())
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
    ]
    chosen, passed_over = None, []
    for step, path in sorted(numbered, reverse=True):
        problem = _problem_of_state(path, step) or _problem_of_parts(path) or _problem_of_files(path)
        if problem is None:
            _check_names(path)
            chosen = str(path)
            break
        passed_over.append(f"{path} is not complete: {problem}.")
    if passed_over:
        way_on = (
            f"Training resumes from {chosen}." if chosen else "No checkpoint is complete: training starts from scratch."
        )
        logger.warning(" ".join([*passed_over, way_on]))
    return chosen


def _problem_of_state(folder: Path, step: int) -> str | None:
    """Written last: where it is right, the others have been written."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "trainer_state.json is missing"
    except (OSError, ValueError):
        return "trainer_state.json is damaged"
    return None if isinstance(state, dict) and state.get("global_step") == step else "trainer_state.json is of another"


def _check_names(folder: Path) -> None:
    """Refuse complete weights of one of our classes whose names differ from today's class."""
    try:
        with Checkpoint(folder) as checkpoint:
            names, config = {info.name for info in checkpoint.tensors.values()}, checkpoint.config
    except CheckpointError:
        return  # adapters, or shards of FSDP or DeepSpeed, which are matched strictly
    architecture = str((config.get("architectures") or [None])[0])
    model_class = MODELS.get(architecture)
    if model_class is None:
        return  # a class of somebody else's
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_pretrained(folder))
    if missing := sorted(model.state_dict().keys() - names - model.all_tied_weights_keys.keys()):
        what = f"{folder}: weights of a {architecture} are missing"
        if are_earlier(names):
            what = f"{folder}: its weights have names from before Blockformer 0.1"
        raise WeightsError(f"{what}. {NOT_RESUMED}:{listed(missing)}")


# What each part of a checkpoint may be called: one process, FSDP, DeepSpeed (which names its folder in "latest").
_PARTS = {
    "weights": (
        "model.safetensors model.safetensors.index.json pytorch_model.bin pytorch_model.bin.index.json "
        "adapter_model.safetensors adapter_model.bin */adapter_model.safetensors */adapter_model.bin "
        "pytorch_model_fsdp.bin pytorch_model_fsdp_*/.metadata latest"
    ),
    "an optimizer": "optimizer.pt optimizer.bin optimizer_*/.metadata latest",
    "a schedule": "scheduler.pt latest",
    "random states": "rng_state.pth rng_state_0.pth",
}


def _problem_of_parts(folder: Path) -> str | None:
    missing = [part for part, names in _PARTS.items() if not any(any(folder.glob(name)) for name in names.split())]
    if missing:
        return f"without {', '.join(missing)}"
    of_processes = len(list(folder.glob("rng_state_*.pth")))
    if of_processes == 1 or any(not (folder / f"rng_state_{rank}.pth").exists() for rank in range(of_processes)):
        return "without the random states of some processes"
    if (folder / "latest").exists():
        named = folder / (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
        return None if named.is_dir() and any(named.iterdir()) else "latest names a folder that is missing"
    return None


def _check_whole(path: Path) -> None:
    """Raise what the library of its format raises of a damaged file, or of an index whose shards are missing."""
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        for shard in set(content["weight_map"].values()) if path.name.endswith(".index.json") else ():
            (path.parent / shard).stat()
    elif path.suffix == ".safetensors":
        with safe_open(path, framework="pt"):
            pass
    elif path.suffix in (".pt", ".pth", ".bin"):
        zipfile.ZipFile(path).close()


def _problem_of_files(folder: Path) -> str | None:
    for path in sorted(folder.rglob("*")):
        try:
            _check_whole(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, zipfile.BadZipFile) as error:
            missing = isinstance(error, FileNotFoundError)
            return f"{path.relative_to(folder)} {'lacks a shard' if missing else 'is damaged'}"
    return None
