"""What a conversion writes: weights, group by group, and the files around them in a Blockformer repo."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.finite import nonfinite
from blockformer.files.front_matter import front_matter
from blockformer.files.generation_settings import FILE, check_settings, settings_in
from blockformer.files.json_files import json_text
from blockformer.files.names import PROCESSOR_FILES
from blockformer.files.new_repo import RepoOptions
from blockformer.files.safetensors_io import PART
from blockformer.files.side_file_kinds import copy_file
from blockformer.files.side_files import SideFiles, carry_side_files, name_the_rest
from blockformer.files.sources import Source, locate
from blockformer.files.tokenizers import compare_tokenizers, has_tokenizer
from blockformer.files.writer import Planned, ShardWriter
from blockformer.model_classes import MODELS
from blockformer.publishing import copy_code, write_card

from .composite import TextCheckpoint, bring_template, opened
from .plan import architecture_of
from .report import ConversionReport
from .rules.groups import Group
from .rules.ties import check_tied


def check_tied_targets(checkpoint: Checkpoint, groups: list[Group], tied: Iterable[tuple[str, str]]) -> None:
    """Refuse tied tensors that would be written twice and differ.

    Args:
        checkpoint, groups, tied: see `CheckpointWeights`.

    Raises:
        ConversionError: naming them.
    """
    makers = {target.name: group for group in groups for target in group.targets}
    check_tied(lambda name: makers[name].parts(name, checkpoint), tied)


class CheckpointWeights:
    """The weights that groups make of a checkpoint's tensors, one at a time; see `blockformer.publishing.write_repo`.

    Args:
        checkpoint: whose tensors are read.
        groups: what to read and write.
        tied: pairs of targets that must be equal.
        files: the paths that must not change.
    """

    def __init__(
        self, checkpoint: Checkpoint, groups: list[Group], tied: Iterable[tuple[str, str]], files: Iterable[Path] = ()
    ):
        self.name, self.files = os.fspath(checkpoint.folder), list(files)
        self.checkpoint, self.groups, self.tied = checkpoint, groups, list(tied)
        self.check_unchanged = checkpoint.check_unchanged

    def planned(self) -> list[Planned]:
        """The targets of all groups."""
        return [(target.name, target.dtype, target.shape) for group in self.groups for target in group.targets]

    def write(self, folder: Path, options: RepoOptions) -> Mapping[str, int]:
        """Write all groups in order. Returns name -> how many elements are NaN or infinite."""
        check_tied_targets(self.checkpoint, self.groups, self.tied)
        with ShardWriter(folder, self.planned(), options.max_shard_size) as writer:
            return self.written_by(writer.write_parts, options)

    def written_by(self, write: Callable[[str, Iterable[Tensor]], None], options: RepoOptions) -> Mapping[str, int]:
        """Give all targets in order to a function: the name, and the elements in parts. Returns what `write` does."""
        counts, done = dict[str, int](), 0
        total = sum(torch.Size(shape).numel() * kind.itemsize for _, kind, shape in self.planned())

        def looked_at(name: str, kind: torch.dtype, parts: Iterable[Tensor]) -> Iterator[Tensor]:
            for part in parts:
                part = part.to(kind)
                counts[name] = counts.get(name, 0) + nonfinite(part)
                yield part

        for group in self.groups:
            if group.is_copy:
                outputs = [self.checkpoint.parts(group.sources[0])]
            else:
                outputs = [_in_parts(tensor) for tensor in group.made(self.checkpoint.read)]
            for target in group.targets:
                parts = outputs.pop(0)
                write(target.name, looked_at(target.name, target.dtype, parts))
                del parts
                done += torch.Size(target.shape).numel() * target.dtype.itemsize
                options.progress("writing weights", done, total)
        return counts


def _in_parts(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's elements in order, flat, in parts as `Checkpoint.parts` has them: a cast of each takes little room."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(PART // tensor.element_size())
    else:
        rows = max(1, PART * len(tensor) // max(1, tensor.nbytes))
        yield from (block.reshape(-1) for block in tensor.split(rows))


@dataclass(frozen=True)
class AroundWeights:
    """What a conversion reads; and the files around the weights of a Blockformer repo that is made of it.

    Attributes:
        checkpoint, place: the source.
        report: gets what became of the source's files.
    """

    checkpoint: Checkpoint
    place: Source
    report: ConversionReport

    @classmethod
    @contextmanager
    def opened(
        cls,
        src: str | PathLike[str],
        dst: str | PathLike[str],
        options: RepoOptions,
        config: str | PathLike[str] | None = None,
        **reading: Any,
    ) -> Iterator["AroundWeights"]:
        """The door of every conversion that writes: its source, located and opened, and the report of it.

        Args:
            src, dst, config, reading: see `convert`, which has checked them.
            options: how the repo is written.

        Raises:
            ConversionError: the source cannot be fetched or read.
        """
        report = ConversionReport(os.fspath(src), Path(dst))
        options.progress("looking at the source", 0, 0)
        place = locate(src, config, **reading)
        report.source = place.title(src)
        with opened(place) as (checkpoint, notes):
            report.notes += notes
            yield cls(checkpoint, place, report)

    def fill(
        self,
        folder: Path,
        config: PretrainedConfig,
        code: Mapping[str, Path],
        copies: Iterable[str] = (),
        record: Callable[[SideFiles], None] | None = None,
        changed: Callable[[], Mapping[str, Any]] | None = None,
    ) -> SideFiles:
        """Write everything but the weights and the card.

        Args:
            folder: with its weights; a model's own `save_pretrained` has written config, settings and code as well.
            config: of the model.
            code: path in the repo -> file, of code that not every repo has.
            copies: files of the source that go into the repo as they are: the record of an earlier conversion.
            record: writes the record of this one, once it is known what became of every file.
            changed: see `carry_side_files`.

        Raises:
            ConversionError: a file of the source is damaged, or a link that leaves the folder.
        """
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")
        if FILE in self.place.names:
            (folder / FILE).unlink(missing_ok=True)  # the source's own is carried
        of_text = isinstance(self.checkpoint, TextCheckpoint)
        names = [name for name in self.place.names if not (of_text and name in PROCESSOR_FILES)]
        side = carry_side_files(self.checkpoint, names, folder, changed)
        bring_template(side)
        for name in copies:
            copy_file(self.checkpoint, name, folder / name)
        copy_code(folder, config)
        for name, path in code.items():
            if not (folder / name).exists():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, folder / name)
        if not (folder / FILE).exists():
            side.write(FILE, json_text(settings_in(self.checkpoint, config)))
        if MODELS[architecture_of(config)].can_generate():
            check_settings(folder)
        side.is_recorded = record is not None
        name_the_rest(side, self.place.names)
        if record is not None:
            record(side)
        self.tell(side)
        return side

    def tell(self, side: SideFiles) -> None:
        """Report what became of the files."""
        self.report.notes += [*side.notes, *side.lines]
        self.report.left_out = side.left_out
        self.report.has_tokenizer = self.checkpoint.is_file or has_tokenizer(self.place.path)

    def compare_tokenizers(self, side: SideFiles) -> None:
        """Report whether the copied tokenizer gives the same ids as the source's.

        Raises:
            ConversionError: it does not, or only one of them can be loaded.
        """
        found = compare_tokenizers(side.tokenizer, side.folder)
        self.report.notes += [found] if found else []

    def write_card(
        self, folder: Path, config: PretrainedConfig, parameters: int, origin: str = "", parity: str = ""
    ) -> None:
        """Write the card, with what the source's says to the Hub.

        Args:
            folder, config: see `fill`.
            parameters: of the model.
            origin, parity: of `blockformer.publishing.write_card`.
        """
        write_card(
            folder,
            config,
            base_model=self.place.hub_id,
            front=front_matter(self.checkpoint),
            parameters=parameters,
            left_out=self.report.left_out,
            origin=origin,
            parity=parity,
        )
