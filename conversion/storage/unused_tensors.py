"""Official tensors that no model uses, kept next to the weights so that the way back is exact.

Old checkpoints hold buffers that are computed today (`position_ids`), or weights their own class never reads (a pooler
under another head). They go into a subfolder, where nothing mistakes them for the model's.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, shown
from blockformer.files.regular import open_regular
from blockformer.files.safetensors_io import SafetensorsWriter, TensorInfo, read_header, read_tensor

from ..rules.groups import Group, Target

UNUSED_FILE = "conversion/unused.safetensors"


@dataclass(frozen=True)
class _Read:
    """The operation that reads an unused tensor from its file."""

    info: TensorInfo

    def forward(self, tensors) -> list[Tensor]:
        with open_regular(self.info.file) as file:
            return [read_tensor(file, self.info)]

    def forward_shapes(self, shapes) -> list[tuple[int, ...]]:
        return [tuple(self.info.shape)]


def write_unused(checkpoint: Checkpoint, names: list[str], target: Path) -> None:
    """Write these tensors of a checkpoint into the repo at `target`, unchanged, one at a time."""
    if not names:
        return
    path = target / UNUSED_FILE
    path.parent.mkdir(exist_ok=True)
    infos = [checkpoint.tensors[name] for name in names]
    writer = SafetensorsWriter(path, [(name, info.dtype, info.shape) for name, info in zip(names, infos, strict=True)])
    try:
        for name in names:
            writer.write_parts(name, checkpoint.parts(name))
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def unused_groups(checkpoint: Checkpoint, names: list[str], dtype: torch.dtype | None) -> list[Group]:
    """The groups that write a repo's unused tensors back.

    Args:
        checkpoint: the repo.
        names: names of the tensors.
        dtype: cast floating-point tensors to this; None keeps their own.

    Raises:
        ConversionError: one is missing.
    """
    if not names:
        return []
    path = checkpoint.folder / UNUSED_FILE
    infos = {}
    if path.exists():
        checkpoint.member(UNUSED_FILE)
        with open_regular(path) as file:
            infos = {info.name: info for info in read_header(file, path)}
    groups = []
    for name in names:
        info = infos.get(name)
        if info is None:
            raise ConversionError(
                f"{path}: {shown(name)} is missing, which the official checkpoint had; download the whole repo again, "
                "or delete conversion.json for a checkpoint without it"
            )
        kind = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
        groups.append(Group((), (Target(name, kind, tuple(info.shape)),), _Read(info)))
    return groups
