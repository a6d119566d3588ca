"""The parts that DeepSpeed ZeRO saves (`global_step500/*_optim_states.pt`), stages 1, 2 and 3, put together in float32.

Each process saves its part of the optimizer's weights as flat vectors without names; another file says in which order
which names and shapes lie in them. Stages 1 and 2 cut one vector a group of parameters into as many parts as there are
processes. Stage 3 cuts each parameter, and fills the last part up. Nothing that the pickles name is run.

A layout that this does not cover for certain (experts, pipelines, tensor parallelism) is refused, and the error names
DeepSpeed's own program.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockformer.files.container_kinds import ZERO_REMEDY
from blockformer.files.containers import latest_step
from blockformer.files.errors import CheckpointError, shown
from blockformer.files.safetensors_io import TensorInfo

from .pieces import Piece
from .rank_files import contents_of, header_of, is_tensor
from .stand_ins import numbers

OPTIMIZER = re.compile(r"((bf16|fp16)_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_00_optim_states\.pt")
MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_00_model_states\.pt")
ELSEWHERE = ("autoep_layers", "ds_autoep_layers")
"""Entries of checkpoints whose experts lie in another way."""


@dataclass(frozen=True)
class Flat:
    """A tensor whose elements lie one after the other in parts of flat vectors.

    Attributes:
        info: the header of the whole.
        pieces: the parts, which may end in padding.
    """

    info: TensorInfo
    pieces: tuple[TensorInfo, ...]

    def read(self) -> Tensor:
        """The whole tensor."""
        parts = [Piece(each, (0,) * len(each.shape)).read().reshape(-1) for each in self.pieces]
        count = torch.Size(self.info.shape).numel()
        whole = torch.cat(parts)[:count] if parts else torch.empty(0)
        return whole.reshape(self.info.shape).to(self.info.dtype)

    @property
    def files(self) -> set[Path]:
        """Where the parts lie."""
        return {each.file for each in self.pieces}


def zero_folder(folder: Path) -> Path | None:
    """The folder with the parts: this one, the one that `latest` names, or the only one in it; None without parts.

    Raises:
        CheckpointError: there are several, and nothing says which.
    """
    if _has_parts(folder):
        return folder
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and _has_parts(path))
    tag = latest_step(folder)
    inner = [path for path in inner if path.name == tag] or inner
    if len(inner) > 1:
        names = ", ".join(shown(path.name) for path in inner[:6])
        raise CheckpointError(f"{folder}: DeepSpeed checkpoints of several steps, {names}; name the folder of one")
    return inner[0] if inner else None


def _has_parts(folder: Path) -> bool:
    return any(folder.glob("*_optim_states.pt"))


def zero_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files with the optimizer's parts and the files that describe the model, each in the order of the processes.

    Raises:
        CheckpointError: files are missing, or have a layout that we do not read.
    """
    found: list[list[Path]] = []
    for pattern, ending in ((OPTIMIZER, "optim"), (MODEL, "model")):
        matches = [(pattern.fullmatch(path.name), path) for path in sorted(folder.glob(f"*_{ending}_states.pt"))]
        if other := [path.name for match, path in matches if match is None]:
            raise _refused(folder, f"{shown(other[0])} is of experts, a pipeline or tensor parallelism")
        ranked = sorted((int(match["rank"] or 0), path) for match, path in matches if match is not None)
        ranks = [rank for rank, _ in ranked]
        if ranks != [*range(len(ranks))] or not ranks:
            lost = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
            raise CheckpointError(f"{folder}: the {ending}_states file of process {lost} is missing; copy all of them")
        found.append([path for _, path in ranked])
    return found[0], found[1]


def read_zero(folder: Path) -> dict[str, Flat]:
    """The tensors of a model, name -> tensor: weights in the optimizer's precision, buffers and frozen weights.

    Raises:
        CheckpointError: parts are missing or damaged, or of a layout that is not read.
    """
    of_optimizer, of_model = zero_files(folder)
    parts = [_Part(path) for path in of_optimizer]
    models = [_Model(path) for path in of_model]
    first = parts[0].state
    stage, world = first.get("zero_stage"), first.get("partition_count")
    counts = {*world} if isinstance(world, list) else {world}
    if stage not in (1, 2, 3) or len(counts) != 1 or any(each in models[0].content for each in ELSEWHERE):
        raise _refused(folder, f"stage {shown(stage)} with {shown(world)} parts is not read")
    if counts != {len(parts)}:
        raise CheckpointError(
            f"{folder}: {len(parts)} of {counts.pop()} optim_states files are there; copy all of them"
        )
    if stage == 3 and len(models) != len(parts):
        raise CheckpointError(f"{folder}: {len(models)} of {len(parts)} model_states files are there; copy all of them")
    found = dict(_buffers(models[0])) | dict(_frozen(models, stage))
    found |= dict(_of_stage_3(parts, models[0]) if stage == 3 else _of_stages_1_and_2(parts, models[0]))
    for name, other in models[0].shared.items():
        if other in found and name not in found:
            found[name] = replace(found[other], info=replace(found[other].info, name=name))
    if stage != 3:  # every process has the whole model in 16 bits, of which frozen weights may be nowhere else
        found = {name: _whole(name, info) for name, info in models[0].tensors("module")} | found
    return found


class _Part:
    """The optimizer's part of one process."""

    def __init__(self, path: Path):
        self.path = path
        content, self.places = contents_of(path)
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: not a part that DeepSpeed ZeRO saves")
        self.state: dict[str, Any] = state

    def vectors(self, key: str) -> list[TensorInfo]:
        """The flat vectors under a key, one a group."""
        found = self.state.get(key)
        if not isinstance(found, list | tuple):
            raise _refused(self.path, f"it has no {key}")
        made = [header_of(key, each, self.path, self.places) for each in found]
        if any(len(each.shape) != 1 or each.strides is not None for each in made):
            raise _refused(self.path, f"{key} are not flat vectors")
        return made


class _Model:
    """What a process says of the model: shapes in the order of the vectors, buffers, frozen weights, shared names."""

    def __init__(self, path: Path):
        self.path = path
        content, self.places = contents_of(path)
        self.content: dict[str, Any] = content if isinstance(content, dict) else {}
        groups = self.content.get("param_shapes")
        if not isinstance(groups, list | tuple) or not all(isinstance(each, dict) for each in groups):
            raise _refused(path, "it has no param_shapes")
        self.groups = [{str(name): numbers(shape) for name, shape in each.items()} for each in groups]
        self.frozen = {str(name): numbers(shape) for name, shape in self._dict("frozen_param_shapes").items()}
        self.shared = {str(name): str(other) for name, other in self._dict("shared_params").items()}

    def _dict(self, key: str) -> dict[str, Any]:
        found = self.content.get(key)
        return found if isinstance(found, dict) else {}

    def tensors(self, key: str) -> Iterator[tuple[str, TensorInfo]]:
        """The plain tensors under a key."""
        for name, each in self._dict(key).items():
            if is_tensor(each):
                yield str(name), header_of(str(name), each, self.path, self.places)


def _buffers(model: _Model) -> Iterator[tuple[str, Flat]]:
    names = model.content.get("buffer_names")
    if not isinstance(names, list | tuple):
        raise _refused(model.path, "it has no buffer_names")
    wanted = {str(name) for name in names}
    return ((name, _whole(name, info, torch.float32)) for name, info in model.tensors("module") if name in wanted)


def _frozen(models: Sequence[_Model], stage: int) -> Iterator[tuple[str, Flat]]:
    """Weights that were not trained, which the optimizer does not have: whole, or a part in each process in stage 3."""
    of_ranks = [dict(model.tensors("frozen_param_fragments")) for model in models[: None if stage == 3 else 1]]
    for name, shape in models[0].frozen.items():
        if not all(name in each for each in of_ranks):
            raise CheckpointError(f"{models[0].path}: {shown(name)} was frozen, and its numbers are not there")
        yield name, _flat(name, shape, [each[name] for each in of_ranks])


def _of_stages_1_and_2(parts: Sequence[_Part], model: _Model) -> Iterator[tuple[str, Flat]]:
    """One vector per group, split over the processes in order, with padding between parameters and at the end."""
    vectors = [part.vectors("single_partition_of_fp32_groups") for part in parts]
    paddings = parts[0].state.get("param_alignment_paddings")
    if {len(each) for each in vectors} != {len(model.groups)}:
        raise _refused(model.path, "its groups differ from the optimizer's")
    for index, shapes in enumerate(model.groups):
        own = [each[index] for each in vectors]
        between = [0] * len(shapes) if paddings is None else list(paddings[index])
        if len(between) != len(shapes) or not all(type(each) is int and each >= 0 for each in between):
            raise _refused(model.path, "its paddings differ from its parameters'")
        offset = 0
        for (name, shape), padding in zip(shapes.items(), between, strict=True):
            count = math.prod(shape)
            yield name, _flat(name, shape, list(_cut(own, offset, count)))
            offset += count + padding
        step = 2 * len(parts)  # vectors are filled up to a multiple of this, or saved without what fills them up
        if math.ceil(offset / step) != math.ceil(sum(math.prod(each.shape) for each in own) / step):
            raise _refused(model.path, "its shapes do not use up the optimizer's numbers")


def _of_stage_3(parts: Sequence[_Part], model: _Model) -> Iterator[tuple[str, Flat]]:
    """Each parameter cut into equal parts, the last one filled up; the parts of a process lie one after the other."""
    vectors = [part.vectors("fp32_flat_groups") for part in parts]
    offset = 0
    for name, shape in ((name, shape) for shapes in model.groups for name, shape in shapes.items()):
        count = math.ceil(math.prod(shape) / len(parts))
        yield name, _flat(name, shape, [piece for own in vectors for piece in _cut(own, offset, count)])
        offset += count
    if any(sum(math.prod(each.shape) for each in own) != offset for own in vectors):
        raise _refused(model.path, "its shapes do not use up the optimizer's numbers")


def _cut(vectors: Sequence[TensorInfo], begin: int, count: int) -> Iterator[TensorInfo]:
    """The parts of vectors, laid end to end, that hold so many elements from there on."""
    start = 0
    for each in vectors:
        size = each.shape[0]
        first, last = max(begin, start), min(begin + count, start + size)
        if first < last:
            place = each.offset + (first - start) * each.dtype.itemsize
            yield TensorInfo(each.name, each.dtype, (last - first,), each.file, place)
        start += size


def _flat(name: str, shape: tuple[int, ...], pieces: Sequence[TensorInfo]) -> Flat:
    if sum(math.prod(each.shape) for each in pieces) < math.prod(shape) or len({each.dtype for each in pieces}) > 1:
        raise CheckpointError(f"{shown(name)}: its parts do not hold {list(shape)} elements of one dtype")
    dtype = pieces[0].dtype if pieces else torch.float32
    file = pieces[0].file if pieces else Path()
    return Flat(TensorInfo(name, dtype, shape, file), tuple(pieces))


def _whole(name: str, info: TensorInfo, wide: torch.dtype | None = None) -> Flat:
    """A tensor of one piece; numbers in 16 bits become `wide`, if that is set."""
    dtype = wide if wide is not None and info.dtype.is_floating_point else info.dtype
    return Flat(TensorInfo(name, dtype, info.shape, info.file), (info,))


def _refused(place: Path, why: str) -> CheckpointError:
    folder = place if place.is_dir() else place.parent
    return CheckpointError(f"{place}: {why}; {ZERO_REMEDY.format(folder=folder)}")
