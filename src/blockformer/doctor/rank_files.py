"""The files that each process of an FSDP2 run pickles (`model_world_size_4_rank_0.pt`): one piece of every tensor.

torch builds such tensors only inside a run of as many processes; here their description is read, and the pieces are put
together.
"""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from blockformer.files.containers import RANK, ranks_of, shard_said
from blockformer.files.errors import CheckpointError, listed, shown
from blockformer.files.pickled import record_begin
from blockformer.files.regular import open_regular
from blockformer.files.safetensors_io import DTYPE_NAMES, TensorInfo

from .pieces import Piece, Pieced, pieced
from .stand_ins import StandIn, name_of, numbers, unpickled

STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
}
TENSORS = ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state")
"""Functions that torch pickles in place of tensors and parameters."""
CONSOLIDATE = (
    "save the whole model with torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
)


@dataclass(frozen=True)
class Shard:
    """The piece of one process.

    Attributes:
        info: its data.
        shape: of the whole tensor.
        dim: the axis along which the pieces lie; None: every process has the whole.
    """

    info: TensorInfo
    shape: tuple[int, ...]
    dim: int | None


def rank_files(folder: Path) -> list[Path]:
    """The files with weights of the processes of a run, in their order; none if there are none."""
    found = [(match, folder / match[0]) for match in ranks_of(path.name for path in folder.iterdir())]
    starts = {(match["start"], match["world"], match["end"]) for match, _ in found}
    if len(starts) > 1:
        names = ", ".join(shown(path.name) for _, path in found[:6])
        raise CheckpointError(f"{folder}: parts of several models, {names}; leave the parts of one model in the folder")
    return [path for _, path in sorted(found, key=lambda each: int(each[0]["rank"]))]


def world_size(path: Path) -> int | None:
    """How many processes there were, as the file's name says; None if it does not say it."""
    match = RANK.fullmatch(path.name)
    return int(match["world"]) if match and match["world"] else None


def read_rank_files(paths: list[Path]) -> dict[str, Pieced]:
    """The whole tensors of the files of all processes.

    Raises:
        CheckpointError: some are missing, damaged, or split in a way that is not read.
    """
    matches = [match for path in paths if (match := RANK.fullmatch(path.name))]
    if {*range(world_size(paths[0]) or len(paths))} - {int(match["rank"]) for match in matches}:
        raise CheckpointError("; ".join(shard_said(matches, paths[0].parent)))
    of_ranks = [read_shards(path) for path in paths]
    if len({frozenset(shards) for shards in of_ranks}) > 1:
        raise CheckpointError(f"{paths[0].parent}: the processes' files do not have the same tensors")
    return {name: _joined(name, [shards[name] for shards in of_ranks]) for name in of_ranks[0]}


def _joined(name: str, shards: list[Shard]) -> Pieced:
    first = shards[0]
    if len({(each.shape, each.dim, each.info.dtype) for each in shards}) > 1:
        raise CheckpointError(f"{shown(name)}: the processes do not agree on its shape and dtype")
    if first.dim is None:
        return pieced(name, first.info.dtype, first.shape, [Piece(first.info, (0,) * len(first.shape))])
    pieces, begin = [], 0
    for shard in shards:
        place = tuple(begin if axis == first.dim else 0 for axis in range(len(first.shape)))
        pieces.append(Piece(shard.info, place))
        begin += shard.info.shape[first.dim]
    return pieced(name, first.info.dtype, first.shape, [piece for piece in pieces if piece.info.nbytes])


def read_shards(path: Path) -> dict[str, Shard]:
    """The pieces in the file of one process, name -> piece; {} if it holds none.

    Raises:
        CheckpointError: it is damaged, or split in a way that is not read.
    """
    loaded, places = contents_of(path)
    named = ((str(name), value) for name, value in _flat(loaded))
    found = ((name, _shard(name, value, path, places)) for name, value in named)
    return {name: shard for name, shard in found if shard is not None}


def contents_of(path: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """What a file of `torch.save` holds, with stand-ins, and where its blocks of data begin and how long they are.

    Raises:
        CheckpointError: it is damaged, or not such a file.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                pickles = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
                places = _records(file, archive.infolist())
                loaded = unpickled(archive.open(pickles[0]), pickles[0].file_size, str(path)) if pickles else {}
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise CheckpointError(f"{path}: damaged, or not a file that torch.save writes; copy it again") from error
    return loaded, places


def _records(file: BinaryIO, members: Iterable[zipfile.ZipInfo]) -> dict[str, tuple[int, int]]:
    """The key of each stored block of data -> where it begins, and its bytes."""
    plain = (each for each in members if "/data/" in each.filename and each.compress_type == zipfile.ZIP_STORED)
    return {each.filename.rpartition("/")[2]: (record_begin(file, each), each.file_size) for each in plain}


def _flat(loaded: Any) -> Iterable[tuple[Any, Any]]:
    """The entries of the state dict, also where it lies under a key."""
    inner = [loaded[key] for key in ("model", "state_dict", "model_state_dict", "app") if _is_dict(loaded, key)]
    return (inner[0] if inner else loaded).items() if isinstance(loaded, dict) else ()


def _is_dict(loaded: Any, key: str) -> bool:
    return isinstance(loaded, dict) and isinstance(loaded.get(key), dict)


def _shard(name: str, value: Any, path: Path, places: dict[str, tuple[int, int]]) -> Shard | None:
    """A tensor of a process, whole or in part, from what the pickle calls to build it; None for anything else."""
    if not isinstance(value, StandIn):
        return None
    if name_of(value) == "_rebuild_parameter":
        return _shard(name, value.arguments[0], path, places)
    if name_of(value) == "_rebuild_tensor_v2":
        info = header_of(name, value, path, places)
        return Shard(info, info.shape, None)
    if name_of(value) != "_rebuild_from_type_v2" and "Sharded" not in name_of(value):
        return None
    _, kind, arguments, states = (*value.arguments, None, None, None, None)[:4]
    parts = states if isinstance(states, tuple) else (states,)
    state = next((each for each in parts if isinstance(each, dict) and "_local_tensor" in each), None)
    if name_of(kind) != "DTensor" or state is None:
        raise CheckpointError(f"{path}: {shown(name)} is split as FSDP1 does it (ShardedTensor): {CONSOLIDATE}")
    shape = numbers(arguments[2])
    placements = state["_spec"].state.get("placements", ()) if isinstance(state.get("_spec"), StandIn) else ()
    dims = [each.state.get("dim") for each in placements if name_of(each) == "Shard"]
    if not placements or len(placements) > 1 or name_of(placements[0]) not in ("Shard", "Replicate"):
        raise CheckpointError(
            f"{path}: {shown(name)} is split over several axes of processes ({listed(map(name_of, placements))}): "
            f"{CONSOLIDATE}"
        )
    return Shard(header_of(name, state["_local_tensor"], path, places), shape, dims[0] if dims else None)


def is_tensor(value: Any) -> bool:
    """Whether it stands for a plain tensor or a parameter, as `header_of` reads them."""
    return isinstance(value, StandIn) and name_of(value) in TENSORS


def header_of(name: str, value: Any, path: Path, places: dict[str, tuple[int, int]]) -> TensorInfo:
    """The header of plain data: `_rebuild_tensor_v2(storage, offset, shape, strides, ...)`."""
    if name_of(value).startswith("_rebuild_parameter"):
        value = value.arguments[0]
    storage, offset, shape, strides = (*value.arguments, None, None, None, None)[:4]
    is_stored = isinstance(storage, tuple) and len(storage) == 5 and str(storage[2]) in places
    dtype = STORAGES.get(name_of(storage[1])) if is_stored else None
    if dtype is None or dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{path}: {shown(name)} has data of an unknown kind: {CONSOLIDATE}")
    begin, size = places[str(storage[2])]
    shape, strides = numbers(shape), numbers(strides)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if type(offset) is not int or (all(shape) and (offset + last + 1) * dtype.itemsize > size):
        raise CheckpointError(f"{path}: {shown(name)} is larger than its stored data; copy the file again")
    plain = _row_by_row(shape) == strides or not all(shape)
    return TensorInfo(name, dtype, shape, path, begin + offset * dtype.itemsize, None if plain else strides)


def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
