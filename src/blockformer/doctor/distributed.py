"""Checkpoints of `torch.distributed.checkpoint` (DCP), as FSDP2, torchtitan and Accelerate write them: read in place.

A folder with `.metadata`, which says what there is, and `*.distcp`, the data of each process. No process group is
needed, and nothing that the pickle names is run.
"""

import re
from pathlib import Path

import torch

from blockformer.files.errors import CheckpointError, shown
from blockformer.files.names import roots_of
from blockformer.files.regular import open_regular
from blockformer.files.safetensors_io import DTYPE_NAMES, TensorInfo

from .pieces import Piece, Pieced, pieced
from .stand_ins import StandIn, name_of, numbers, unpickled

METADATA = ".metadata"
NOT_WEIGHTS = re.compile(r"(optim|optimizer|optimizers|lr_scheduler|scheduler|dataloader|train_state|rng)(\.|$|_state)")
"""Beginnings of names that are not part of the model."""


def read_distributed(folder: Path) -> dict[str, Pieced]:
    """The tensors of a distributed checkpoint, name -> tensor, without the optimizer's.

    Raises:
        CheckpointError: it is damaged, compressed, or parts of it are missing.
    """
    path = folder / METADATA
    with open_regular(path) as file:
        table = unpickled(file, path.stat().st_size, str(path))
    state = table.state if isinstance(table, StandIn) else {}
    tensors, places = state.get("state_dict_metadata"), state.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise CheckpointError(f"{path}: not the table of contents of a distributed checkpoint")
    data = _data(folder, places)
    found: dict[str, Pieced] = {}
    for name, entry in tensors.items():
        chunks = entry.state.get("chunks") if isinstance(entry, StandIn) else None
        if not isinstance(name, str) or NOT_WEIGHTS.match(name) or not isinstance(chunks, list):
            continue
        kind = next(iter(getattr(entry.state.get("properties"), "values", ())), None)
        dtype = getattr(torch, name_of(kind) or "-", None)
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{path}: {shown(name)} has an unknown dtype")
        pieces = [_piece(folder, name, dtype, chunk, data) for chunk in chunks]
        found[name] = pieced(name, dtype, numbers(entry.state.get("size")), pieces)
    if not found:
        raise CheckpointError(f"{path}: names no tensors of a model")
    return found


def _data(folder: Path, places: dict) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """(tensor, where the piece begins in it) -> (file, offset, bytes)."""
    data = {}
    for index, place in places.items():
        if not (isinstance(index, StandIn) and isinstance(place, StandIn)):
            raise CheckpointError(f"{folder / METADATA}: not the table of contents of a distributed checkpoint")
        file, offset, length = (place.state.get(each) for each in ("relative_path", "offset", "length"))
        if not (
            isinstance(file, str) and Path(file).name == file and isinstance(offset, int) and isinstance(length, int)
        ):
            raise CheckpointError(f"{folder / METADATA}: names a file outside the folder")
        if place.state.get("transform_descriptors"):
            raise CheckpointError(f"{folder}: compressed parts; save it again without compression")
        data[str(index.state.get("fqn")), numbers(index.state.get("offset"))] = (file, offset, length)
    return data


def _piece(folder: Path, name: str, dtype: torch.dtype, chunk: object, data: dict) -> Piece:
    state = chunk.state if isinstance(chunk, StandIn) else {}
    begin, shape = numbers(state.get("offsets")), numbers(state.get("sizes"))
    if (name, begin) not in data:
        raise CheckpointError(f"{folder}: no file has the part of {shown(name)} that begins at {list(begin)}")
    file, offset, length = data[name, begin]
    path = folder / file
    if not path.resolve().is_relative_to(roots_of(folder)[0]):
        raise CheckpointError(f"{path}: a link that leaves the folder")
    if not path.is_file() or offset < 0 or length <= 0 or path.stat().st_size < offset + length:
        what = "is cut short" if path.is_file() else "is missing"
        raise CheckpointError(f"{path}: {what}; copy the whole folder again")
    return Piece(TensorInfo(name, dtype, shape, path, offset), begin, length)
