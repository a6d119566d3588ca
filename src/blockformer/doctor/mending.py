"""A whole checkpoint in the released layout, made of one that is not: written tensor by tensor, then read again."""

import os
from os import PathLike
from pathlib import Path
from typing import Any

from blockformer.conversion.composite import in_text
from blockformer.conversion.model_tensors import stored_pairs
from blockformer.conversion.remedies import plan_official
from blockformer.conversion.rules.ties import are_same
from blockformer.conversion.writing import CheckpointWeights
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import is_ours
from blockformer.files.containers import ADAPTERS
from blockformer.files.errors import ConversionError, listed
from blockformer.files.json_files import json_text
from blockformer.files.names import CODE_FILES, is_side_file
from blockformer.files.new_repo import RepoOptions
from blockformer.files.progress import Progress, silent
from blockformer.files.quiet import quiet
from blockformer.files.side_file_kinds import copy_file
from blockformer.publishing import copy_code
from blockformer.publishing.write_repo import RepoReport, write_repo

from .adapters import WithAdapter
from .checking import compared_logits
from .diagnosing import diagnosis_of, examined
from .examination import Examination
from .finding import Diagnosis
from .name_map import is_map
from .options import Options
from .own_tokenizers import write_own_tokenizer
from .weight_numbers import rows_of

NOT_COPIED = ("config.json", "conversion.json", *ADAPTERS)
"""Files next to the weights that we write ourselves, or that belong to what we leave out."""


def mend(
    source: str | PathLike[str],
    target: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    *,
    options: Options | None = None,
    force: bool = False,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
    **reading: Any,
) -> Diagnosis:
    """Write the checkpoint as it should be: in its family's released layout, as safetensors, with a config that fits.

    Memory as `convert`: the largest group of tensors that are changed together. What is written is read again and
    compared, tensor by tensor, before the folder appears; the source stays as it is.

    Args:
        source, against, options, progress, reading: see `diagnose`.
        target: the folder to create.
        force: replace a folder that Blockformer made, if nobody changed it.
        max_shard_size: largest size of a weight file, such as "5GB".

    Returns:
        The diagnosis of the source, with the changes that were made.

    Raises:
        ConversionError: the tensors do not determine what is to be written: the message says which options do. Nothing
            is written then.
    """
    repo = RepoOptions(max_shard_size, force, progress=progress or silent)
    choices = options or Options()
    with examined(source, against, choices, **reading) as (found, other):
        diagnosis = diagnosis_of(source, found, other, against, True, repo.progress)
        check_mendable(diagnosis, "mended")
        places = [each.file or each.folder for each in (found.checkpoint, other) if each is not None]
        ties = [] if found.layouts is None else stored_pairs(found.layouts.tied, found.groups)
        weights = CheckpointWeights(found.checkpoint, found.groups, ties, places)
        report = RepoReport(os.fspath(source), Path(target))

        def fill(folder: Path) -> None:
            (folder / "config.json").write_text(json_text(found.config), encoding="utf-8")
            if is_ours(found.config) and found.layouts is not None:
                copy_code(folder, found.layouts.config)
            diagnosis.changes += copy_side_files(found, folder, choices)
            _verify(found, folder, repo.progress)
            if choices.check is not None:
                diagnosis.changes.append(compared_logits(folder, choices.check))

        write_repo(weights, repo, fill, report)
    diagnosis.changes += [f"{report.tensors} tensors written, read again and compared", *report.notes]
    return diagnosis


def check_mendable(diagnosis: Diagnosis, done: str) -> None:
    """Refuse a checkpoint that cannot be made whole.

    Args:
        diagnosis: of it.
        done: what is not done: "mended".

    Raises:
        ConversionError: lists what must be settled first.
    """
    if not diagnosis.is_mendable:
        open_ = [each for each in diagnosis.findings if each.is_open]
        lines = [f"{each.sentence}; {each.remedy}" if each.remedy else each.sentence for each in open_]
        raise ConversionError(f"{diagnosis.source}: not {done}; this must be settled first:{listed(lines)}")


def copy_side_files(found: Examination, folder: Path, choices: Options) -> list[str]:
    """Copy tokenizer, generation settings, licence and notes as they are. Returns sentences on them for the report."""
    checkpoint = found.checkpoint
    settings = None if found.code is None else found.code.settings_file(checkpoint)
    copied, left = [], []
    folders = [checkpoint.base.folder] if isinstance(checkpoint, WithAdapter) else []
    files = {path.name: path for folder in (*folders, checkpoint.folder) for path in folder.iterdir()}
    asked = {Path(each).resolve() for each in (choices.names, choices.check, settings) if each is not None}
    for name, path in sorted(files.items()):
        if not path.is_file() or name in NOT_COPIED or name.startswith(".") or path.resolve() in asked:
            continue
        if path.suffix == ".json" and is_map(path):
            continue  # the user's, of this or another attempt
        if is_side_file(name, path.stat().st_size) and not (folder / name).exists():
            copy_file(checkpoint, name, folder / name)
            copied.append(name)
        elif name.endswith(CODE_FILES):
            left.append(name)
    said = [f"copied as they are: {', '.join(copied)}"] if copied else []
    rows = rows_of(found.written.tensors, found.layouts)
    said += write_own_tokenizer(checkpoint.folder, folder, rows, found.config, choices.tiktoken)
    return said + ([f"not copied, code of the folder: {', '.join(left)}"] if left else [])


def _verify(found: Examination, folder: Path, report_progress: Progress) -> None:
    """Read the written files strictly, and compare each tensor with the one that should be there."""
    written = found.written
    with Checkpoint(folder) as result:
        if not is_ours(result.config):
            with quiet():
                plan_official(in_text(result), None if found.layouts is None else found.layouts.family_name, None)
        done, total = 0, sum(info.nbytes for info in result.tensors.values())
        for name, info in result.tensors.items():
            if not are_same(result.parts(name), written.parts(name)):
                raise ConversionError(f"{folder}: {name} is not what was to be written")
            done += info.nbytes
            report_progress("comparing", done, total)
