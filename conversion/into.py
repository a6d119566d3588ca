"""The way back of a text model into the composite checkpoint that it came from: a copy with this text in it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockformer.files.atomic import MARK
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import NEVER_FOLLOWED
from blockformer.files.errors import ConversionError, shown
from blockformer.files.new_repo import RepoOptions
from blockformer.files.reasons import OTHER_FORMAT, OTHER_WEIGHTS, reason_for
from blockformer.files.safetensors_io import memory_of, torch_name
from blockformer.files.side_file_kinds import copy_file, files_read
from blockformer.files.sources import LISTED, files_in, locate

from .composite import TextCheckpoint, opened
from .families.settings import ABOUT_THE_FILE
from .origin import Origin, read_origin
from .plan import Plan
from .rules.groups import Group, targets_of
from .storage.low_bits import FIELD
from .uses import HEAD, TIED
from .values import TOKENS
from .writing import CheckpointWeights, check_tied_targets

FREE = {*ABOUT_THE_FILE, *NEVER_FOLLOWED, *TOKENS, "dtype", "use_cache", "initializer_range", "attention_dropout"}
"""Settings of a text that training may change: what it computes does not depend on them."""


class IntoComposite(CheckpointWeights):
    """The weights of a text, written into a copy of a composite checkpoint.

    Args:
        checkpoint: the text, in our layout.
        plan: its way back, as `plan_into` has it.
        text: the text of the composite.
        files: the paths that must not change, besides the composite.

    Attributes:
        notes: what a user must know of the files that are copied.

    Raises:
        ConversionError: the composite has too many files.
    """

    def __init__(self, checkpoint: Checkpoint, plan: Plan, text: TextCheckpoint, files: Iterable[Path] = ()):
        super().__init__(checkpoint, plan.groups, plan.tied, [*files, text.folder])
        self.text = text
        found = files_in(text.folder)
        if len(found) >= LISTED:
            raise ConversionError(f"{text.folder}: {LISTED} files or more; copy only the checkpoint to another folder")
        self.names = [name for name in found if not name.endswith("/") and name != MARK]
        others = [name for name in self.names if name not in files_read(text.whole)]
        stale = [name for name in others if reason_for(name) in (OTHER_WEIGHTS, OTHER_FORMAT)]
        left = [name for name in found if name.endswith("/")]
        kinds = {"copied as they are, with the old text model": stale, "not copied": left}
        self.notes = [f"{kind}: {', '.join(map(shown, names))}" for kind, names in kinds.items() if names]

    def check_unchanged(self) -> None:
        self.checkpoint.check_unchanged()
        self.text.check_unchanged()

    def write(self, folder: Path, options: RepoOptions) -> Mapping[str, int]:
        """Copy all files, and write the tensors of the text over the old ones."""
        check_tied_targets(self.checkpoint, self.groups, self.tied)
        for done, name in enumerate(self.names):
            options.progress("copying files", done, len(self.names))
            copy_file(self.text, name, folder / name)

        def put(name: str, parts: Iterable[Tensor]) -> None:
            info, written = self.text.tensors[name], 0
            if name in self.text.turned:
                parts = [torch.cat([part.clone() for part in parts]).view(info.shape).mT.contiguous()]
            with open(folder / info.file.name, "r+b") as file:
                file.seek(info.offset)
                for part in parts:
                    written += file.write(memory_of(part))
            assert written == info.nbytes, f"{name}: {written} bytes in place of {info.nbytes}"

        return self.written_by(put, options)


@contextmanager
def composite(into: str | PathLike[str] | None) -> Iterator[TextCheckpoint | None]:
    """The text of the composite checkpoint in a folder; None for None.

    Raises:
        ConversionError: it is not composite, or its weights cannot be written over.
    """
    if into is None:
        yield None
        return
    place = locate(into)
    with opened(place) as (text, _):
        if not isinstance(text, TextCheckpoint):
            raise ConversionError(
                f"{into}: model_type is {shown(text.config.get('model_type'))}, which has no towers next to a text "
                "model; into (--into) names the checkpoint that the text was made from"
            )
        if FIELD in text.config:
            raise ConversionError(
                f"{into}: its text has weights in few bits, and plain ones cannot be written over them; leave out into "
                "(--into), or name the checkpoint with plain weights"
            )
        if any(info.file.suffix != ".safetensors" for info in text.tensors.values()) or place.around is not None:
            raise ConversionError(f"{into}: only safetensors files next to config.json can be written into")
        yield text


def plan_into(plan: Plan, checkpoint: Checkpoint, text: TextCheckpoint) -> Plan:
    """The way back of a text of ours into a composite checkpoint.

    Args:
        plan: its way back into the layout of its family.
        checkpoint: the text, in our layout.
        text: the text of the composite.

    Raises:
        ConversionError: the text was not made of this checkpoint, or has other shapes or settings now.
    """
    origin, into = read_origin(checkpoint), text.folder
    if origin is None or not origin.composite:
        raise ConversionError(
            f"{checkpoint.folder}: was not made from a checkpoint with other towers, so it cannot go back into one; "
            "leave out into (--into)"
        )
    if (kind := origin.composite.get("model_type")) != text.text.model_type:
        raise ConversionError(
            f"{into}: a checkpoint of {text.text.model_type!r}, but the text in {checkpoint.folder} came from one of "
            f"{shown(kind)}; name that one"
        )
    check_tied_targets(checkpoint, plan.groups, plan.tied)
    groups = _with_ties(plan.groups, text)
    made = targets_of(groups)
    lines = [
        f"{shown(name)} is {_shape(made.get(name))} here and {_shape(text.tensors.get(name))} there"
        for name in {**made, **text.tensors}
        if _shape(made.get(name)) != _shape(text.tensors.get(name))
    ]
    if lines:
        more = f", and {len(lines) - 1} more differ" if lines[1:] else ""
        raise ConversionError(f"{into}: its text model has other shapes than {checkpoint.folder}: {lines[0]}{more}")
    after, before = (
        each.to_dict() for each in (plan.target_config, plan.family.settings.official_config(origin.config))
    )
    names = ({*after} | {*before}) - FREE
    if changed := sorted(name for name in names if after.get(name) != before.get(name)):
        raise ConversionError(
            f"{checkpoint.folder}: {', '.join(changed)} changed since the text was taken from its checkpoint, whose "
            "config.json stays as it is; set the old values again, or leave out into (--into)"
        )
    if unlike := _unlike(origin, text):
        raise ConversionError(f"{into}: not the checkpoint that {checkpoint.folder} was made from: its {unlike}")
    cast = {torch_name(made[name].dtype) for name, info in text.tensors.items() if made[name].dtype != info.dtype}
    notes = [f"weights in {each} are cast to the dtype that {into} has" for each in sorted(cast)]
    return replace(
        plan,
        groups=[_with_dtypes(group, text) for group in groups],
        tied=[],
        target_config=text.text.whole,
        target_class=text.text.whole_class,
        others=text.left_numbers,
        notes=[*plan.notes, *notes, f"tokenizer, chat template and settings come from {into}"],
    )


def _with_ties(groups: list[Group], text: TextCheckpoint) -> list[Group]:
    """The groups with a tied head as the composite has it: stored twice, or left out."""
    names = targets_of(groups)
    if not getattr(text.text.whole, "tie_word_embeddings", False) or not {HEAD, TIED} <= {*names, *text.tensors}:
        return groups
    kept = [group for group in groups if group.targets[0].name in text.tensors or group.targets[0].name != HEAD]
    if HEAD in text.tensors and HEAD not in names:
        first = next(group for group in groups if group.targets[0].name == TIED)
        kept.append(first.renamed(lambda _: HEAD))
    return kept


def _with_dtypes(group: Group, text: TextCheckpoint) -> Group:
    targets = tuple(replace(target, dtype=text.tensors[target.name].dtype) for target in group.targets)
    return replace(group, targets=targets)


def _shape(header: Any) -> str:
    return "missing" if header is None else str([*header.shape])


def _unlike(origin: Origin, text: TextCheckpoint) -> str:
    """What tells a composite from the one that a text was made of; "" for nothing."""
    words = {"config": "config.json differs", "left": "other tensors differ"}
    found = text.fingerprint()
    return " and its ".join(word for name, word in words.items() if found[name] != origin.composite.get(name))
