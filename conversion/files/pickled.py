"""Pickled checkpoints (`pytorch_model.bin`): read only by `torch.load(weights_only=True)`, after our own checks.

Accepted: a flat dict of names to plain tensors, or that dict under a well-known key (`{"state_dict": {...}, ...}`, as
training frameworks write it; anything beside it is ignored). In a folder only the key `state_dict` counts; in a
weight file that a user names it may be any one of `WRAPPERS`. Two of them in one file, or one of them beside tensors
with names like a module's ("head.weight"), are refused, because it would be a guess which is the model. Everything
else is refused too; there is no fallback.
"""

import zipfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError, listed, shown
from .safetensors_io import DTYPE_NAMES, LFS_POINTER, MAX_TENSORS, TensorInfo, open_regular

ZIP = b"PK\x03\x04"
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save a model's state dict, beside the epoch and the optimizer's state."""
RESAVE = "save it again as safetensors with a tool that you trust"


def load(path: Path, verify: bool = True, wrappers: Collection[str] = WRAPPERS[:1]) -> dict[str, Tensor]:
    """The tensors of a pickled file; zip files stay on disk (memory-mapped) until a tensor is used.

    Args:
        path: the file.
        verify: also read the whole file once and check its checksums.
        wrappers: keys of which one may hold the tensors.

    Raises:
        CheckpointError: damaged, compressed, or holding more than plain tensors, such as code to run.
    """
    with open_regular(path) as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise CheckpointError(f"{path}: a git-LFS pointer, not the file itself; run `git lfs pull` in its folder")
        is_zip = start[:4] == ZIP
        records = _check_zip(file, path, verify) if is_zip else None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:
        raise CheckpointError(
            f"{path}: refused: damaged, or more than plain tensors in it (nothing of it was run); {RESAVE}. "
            f"{_reason(error)}"
        ) from error
    tensors = _state_dict(loaded, path, wrappers)
    if records is not None:
        _check_storages(tensors, path, records)
    return tensors


def _reason(error: Exception) -> str:
    """Torch's reason in one printable line, without its advice to load the file anyway."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    return "".join(letter if letter.isprintable() else " " for letter in text[:300]) or type(error).__name__


def headers(path: Path, wrappers: Collection[str] = WRAPPERS[:1]) -> list[TensorInfo]:
    """The headers of what `load` would return."""
    return [
        TensorInfo(name, tensor.dtype, tuple(tensor.shape), path, tensor.nbytes)
        for name, tensor in load(path, verify=False, wrappers=wrappers).items()
    ]


def _check_zip(file: BinaryIO, path: Path, verify: bool) -> list[int]:
    """Sizes of a zip file's records, checked not to be compressed, repeated or overlapping (with `verify`, intact)."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > 2 * MAX_TENSORS:
                raise CheckpointError(f"{path}: more than {MAX_TENSORS} tensors")
            if len({member.filename for member in members}) < len(members):
                raise CheckpointError(f"{path}: a zip record is there twice; {RESAVE}")
            stored = sum(member.file_size for member in members)
            if any(member.compress_type != zipfile.ZIP_STORED for member in members) or stored > path.stat().st_size:
                raise CheckpointError(f"{path}: compressed or overlapping zip records (a zip bomb?); {RESAVE}")
            damaged = archive.testzip() if verify else None
            if damaged is not None:
                raise CheckpointError(f"{path}: wrong checksum of {shown(damaged)}; download it again")
    except CheckpointError:
        raise
    except Exception as error:  # of a damaged file the library raises nearly anything
        raise CheckpointError(f"{path}: damaged zip file ({shown(error)}); download it again") from error
    return [member.file_size for member in members]


def _state_dict(loaded: Any, path: Path, wrappers: Collection[str]) -> dict[str, Tensor]:
    """The flat dict of plain tensors in a loaded file, unwrapped."""
    found = [key for key in wrappers if isinstance(loaded, dict) and isinstance(loaded.get(key), dict)]
    if found:
        beside = [str(name) for name, value in loaded.items() if isinstance(value, Tensor) and "." in str(name)]
        if len(found) > 1 or beside:
            others = ", ".join(map(shown, [*found[1:], *beside[:3]]))
            raise CheckpointError(
                f"{path}: {shown(found[0])} and, beside it, {others}: which is the model? Save its state dict alone"
            )
        loaded = loaded[found[0]]
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: holds a {type(loaded).__name__}, not a dict of names to tensors; {RESAVE}")
    problems = [f"{shown(name)}: {problem}" for name, value in loaded.items() if (problem := _fault(name, value))]
    if problems:
        raise CheckpointError(f"{path}: not a flat dict of names to plain tensors; {RESAVE}:{listed(problems)}")
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _fault(name: object, value: object) -> str | None:
    if type(name) is not str:
        return f"its name is a {type(name).__name__}"
    if type(value) not in (Tensor, torch.nn.Parameter):
        return f"is a {type(value).__name__}"
    assert isinstance(value, Tensor)
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        return f"is not a plain tensor ({value.layout}, {value.device})"
    if value.dtype not in DTYPE_NAMES:
        return f"has the dtype {value.dtype}"
    if value.nbytes > value.untyped_storage().nbytes():
        return "is larger than its stored data"
    return None


def _check_storages(tensors: dict[str, Tensor], path: Path, records: list[int]) -> None:
    """Every storage is a whole zip record. (A memory-mapped load goes on into the next record if a tensor says so.)"""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors.values())}
    if Counter(size for size in storages.values() if size) - Counter(records):
        raise CheckpointError(f"{path}: tensors that are larger than their stored data; download it again")
