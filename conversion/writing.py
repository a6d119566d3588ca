"""Steps shared by everything that writes a repo: open the source, write weights and generation settings."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, is_out_of_memory, listed, shown
from blockformer.files.finite import nonfinite
from blockformer.files.generation_settings import FILE, settings_in
from blockformer.files.json_files import json_text
from blockformer.files.safetensors_io import PART
from blockformer.files.sources import Source
from blockformer.files.writer import ShardWriter

from .progress import Progress
from .rules.table import Group


@contextmanager
def opened(place: Source):
    """The checkpoint of a source, and a list of notes that starts with warnings from opening it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = Checkpoint(place.path, place.config, place.weights, place.around)
    with checkpoint:
        yield checkpoint, [str(warning.message) for warning in caught]


@contextmanager
def memory_errors():
    """Turn running out of memory into a ConversionError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        message = "out of memory; free some, or convert with verify=False"
        raise ConversionError(f"{message} ({reason})" if reason else message) from error


def write_weights(
    checkpoint: Checkpoint,
    groups: list[Group],
    folder: Path,
    max_shard_size: int | str,
    strict_finite: bool,
    report_progress: Progress,
) -> list[str]:
    """Write all groups in order. Returns notes on the values."""
    planned = [(target.name, target.dtype, target.shape) for group in groups for target in group.targets]
    total = sum(torch.Size(shape).numel() * kind.itemsize for _, kind, shape in planned)
    done, counts = 0, dict[str, int]()

    def looked_at(name: str, kind: torch.dtype, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        for part in parts:
            part = part.to(kind)
            counts[name] = counts.get(name, 0) + nonfinite(part)
            yield part

    with ShardWriter(folder, planned, max_shard_size) as writer:
        for group in groups:
            if group.is_copy:
                outputs = [checkpoint.parts(group.sources[0])]
            else:
                outputs = [_in_parts(tensor) for tensor in group.made(checkpoint.read)]
            for target in group.targets:
                parts = outputs.pop(0)
                writer.write_parts(target.name, looked_at(target.name, target.dtype, parts))
                del parts
                done += torch.Size(target.shape).numel() * target.dtype.itemsize
                report_progress("writing weights", done, total)
    elements = {name: (torch.Size(shape).numel(), str(kind)[6:]) for name, kind, shape in planned}
    bad = [
        f"{shown(name)}: {count} of {elements[name][0]} in {elements[name][1]}"
        for name, count in counts.items()
        if count
    ]
    if bad and strict_finite:
        raise ConversionError(f"{checkpoint.folder}: NaN or infinite values:{listed(bad)}")
    return [f"NaN or infinite values (kept as they are):{listed(bad)}"] if bad else []


def _in_parts(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's elements in order, flat, in parts as `Checkpoint.parts` has them: a cast of each takes little room."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(PART // tensor.element_size())
    else:
        rows = max(1, PART * len(tensor) // max(1, tensor.nbytes))
        yield from (block.reshape(-1) for block in tensor.split(rows))


def write_generation_config(
    checkpoint: Checkpoint, folder: Path, entries: Mapping[str, Any], config: PretrainedConfig
) -> str | None:
    """Write generation settings into a repo unless the source had a file of them. Returns the file's name if it did."""
    if (folder / FILE).exists():
        return None
    (folder / FILE).write_text(json_text(settings_in(checkpoint, entries, config)), encoding="utf-8")
    return FILE
