"""The diagnosis of a folder or file: everything that is unusual about it, and whether it can be mended."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from blockformer.files.errors import memory_errors
from blockformer.files.progress import Progress, silent
from blockformer.files.safetensors_io import torch_name
from blockformer.files.sizes import format_size
from blockformer.files.sources import locate

from .adapters import WithAdapter, scale_of
from .any_checkpoint import AnyCheckpoint
from .around import around_weights, moved_tokens
from .examination import Examination, examine
from .finding import WARNING, Diagnosis, Finding, counted
from .layouts import Layouts
from .options import Options
from .weight_files import ADAPTER
from .weight_numbers import kept_wide, of_dtypes, of_numbers, of_ties, rows_of

SAID_ELSEWHERE = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"}
"""Entries of `config.json` that describe the file, and not the model."""


def diagnose(
    source: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    *,
    options: Options | None = None,
    quick: bool = False,
    progress: Progress | None = None,
    **reading: Any,
) -> Diagnosis:
    """Find out what a checkpoint is and what is wrong with it. Nothing of it is run, and nothing is written.

    Memory: the largest tensor that is in pieces, or a part of 1 MiB; `quick` reads no numbers.

    Args:
        source: a folder, a file with weights, or a Hub id.
        against: the checkpoint that it was made of, a folder or a Hub id: for the config that is missing, and to
            compare weights and tokenizer with.
        options: what only the user can say; see `Options`.
        quick: look at names, shapes and settings only.
        progress: receives progress reports.
        reading: for a Hub id: `revision`, `local_files_only`, ...; see `blockformer.files.sources.Reading`.

    Raises:
        ConversionError: the folder, file or repo does not exist, or an option is wrong.
    """
    with memory_errors(), examined(source, against, options or Options(), **reading) as (found, other):
        return diagnosis_of(source, found, other, against, quick, progress or silent)


@contextmanager
def examined(
    source: str | PathLike[str], against: str | PathLike[str] | None, options: Options, **reading: Any
) -> Iterator[tuple[Examination, AnyCheckpoint | None]]:
    """The examination of a checkpoint, and the other checkpoint, both open."""
    other = None if against is None else AnyCheckpoint(place_of(against))
    checkpoint = AnyCheckpoint(place_of(source, **reading), key=options.key)
    if not checkpoint.config and checkpoint.adapter is None and other is not None and other.config:
        checkpoint.config = dict(other.config)
        checkpoint.findings = [each for each in checkpoint.findings if each.kind != "config"]
        said = "config.json is missing, so the other checkpoint's is used"
        checkpoint.findings.append(Finding("config", WARNING, said, "copy it", True))
    if checkpoint.adapter is not None and other is not None and other.tensors:
        options = replace(options, lora_scale=scale_of(checkpoint.adapter, os.fspath(source)))
        checkpoint = WithAdapter(other, checkpoint)
    with checkpoint:
        yield examine(checkpoint, options), other
    if other is not None:
        other.close()


def place_of(source: str | PathLike[str], **reading: Any) -> Path:
    """The folder or file that a source names; of a Hub id, the downloaded one."""
    return Path(source) if os.path.lexists(source) else locate(source, **reading).path


def diagnosis_of(
    source: str | PathLike[str],
    found: Examination,
    other: AnyCheckpoint | None,
    against: str | PathLike[str] | None,
    quick: bool,
    progress: Progress,
) -> Diagnosis:
    """The diagnosis, from an examination of names and, unless it is quick, from the numbers."""
    checkpoint, written = found.checkpoint, found.written
    title = os.fspath(against) if against is not None else ""
    result = Diagnosis(
        os.fspath(source),
        family=_family(found),
        tensors=len(checkpoint.tensors),
        nbytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        dtypes=dict(Counter(torch_name(info.dtype) for info in checkpoint.tensors.values())),
        changes=found.changes,
        is_mendable=found.is_whole,
    )
    result.add([*checkpoint.findings, *found.findings])
    kinds = {each.kind for each in result.findings}
    if kinds & {"shards", "file"}:  # tensors of missing files are not a second finding
        result.findings = [each for each in result.findings if each.kind != "missing"]
    is_plain = found.is_one_model
    if checkpoint.kind != ADAPTER and checkpoint.tensors and is_plain:
        result.add(of_dtypes(checkpoint.tensors, found.config, kept_wide(found.layouts)))
        if found.layouts is not None:
            result.add([] if quick else of_ties(written, found.layouts))
            longest = getattr(found.layouts.config, "max_position_embeddings", None)
            rows = rows_of(written.tensors, found.layouts)
            result.add(around_weights(checkpoint.folder, found.config, rows, longest))
            result.add(_of_settings(found.config, found.layouts))
    if other is not None:
        result.add(_differences(found.config, other.config, title))
        result.add(moved_tokens(checkpoint.folder, other.folder, title))
    if not quick and checkpoint.tensors and is_plain:
        same_names = found.layouts is not None and found.groups
        result.add(of_numbers(written if same_names else checkpoint, other, title, progress, _unread(found)))
    result.is_mendable &= not any(each.is_open and each.kind in BLOCKING for each in result.findings)
    result.what = _what(found, result)
    return result


def _unread(found: Examination) -> set[str]:
    """Names of tensors that the model does without: a pooler, or what stands next to the weights of a whole model."""
    if found.layouts is None:
        return set()
    others = {*found.written.tensors} - {*found.layouts.known} if found.plan is not None else set()
    return {*found.layouts.optional, *others}


BLOCKING = ("file", "shards", "twice", "adapter-and-weights", "unmerged", "misread", "layer-types", "token-id", "tied")
"""Kinds of errors after which nobody can say that the written checkpoint is the model."""


def _of_settings(entries: Mapping[str, Any], layouts: Layouts) -> list[Finding]:
    family = layouts.family
    notes = family.settings.unused_note(entries, only_misspelt=True) if family is not None else []
    return [Finding("misspelt", WARNING, note, "correct the names") for note in notes]


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], title: str) -> list[Finding]:
    names = [name for name in theirs if name in ours and ours[name] != theirs[name] and name not in SAID_ELSEWHERE]
    if not names or not ours:
        return []
    told = ", ".join(f"{name} is {ours[name]!r} and {theirs[name]!r} there" for name in names[:4])
    more = f", and {len(names) - 4} more" if names[4:] else ""
    return [
        Finding(
            "config",
            WARNING,
            f"config.json differs from that of {title}: {told}{more}",
            "training rarely changes it: is this meant?",
            names=tuple(names),
        )
    ]


def _family(found: Examination) -> str | None:
    """The name of the official family; None where it is unknown, or the model is of Blockformer's own layout."""
    if found.plan is not None:
        return found.plan.family.name
    return None if found.layouts is None else found.layouts.family_name


def _what(found: Examination, result: Diagnosis) -> str:
    """What it is, in one sentence."""
    if not result.tensors:
        return found.checkpoint.kind
    layouts = found.layouts
    if found.checkpoint.kind == ADAPTER:
        is_lora = (found.checkpoint.adapter or {}).get("peft_type") in (None, "LORA")
        kind = ADAPTER if is_lora else "an adapter"
        return f"{kind}, {counted(result.tensors, 'tensor')}, {format_size(result.nbytes)}, {', '.join(result.dtypes)}"
    if layouts is None and found.plan is not None:
        kind = found.plan.source_class.__name__  # of a composite checkpoint another than the text's
        kind += " in few bits" if kind == found.plan.variant.head else ""
    elif layouts is None:
        kind = str(found.config.get("model_type") or "an unknown family")
    else:
        kind = layouts.head or f"a {type(layouts.config).__name__} of Blockformer"
    dtypes = ", ".join(result.dtypes)
    return f"{kind}, {found.checkpoint.kind}, {result.tensors} tensors, {format_size(result.nbytes)}, {dtypes}"
