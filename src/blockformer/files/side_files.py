"""The files next to the weights: each one of the source is carried, converted, or named with the reason why it is not.

- What a repo is read with stays at its place: tokenizer, generation settings, chat templates, files that
  sentence-transformers reads; and licences, which travel with the weights.
- What has a file of ours at its place, and other small texts, lie in `conversion/source/`, for the way back.
- Everything else (code, other formats, second copies of the weights) is left out and named: whoever writes a repo
  calls `name_the_rest` at the end, which compares the source's files with what was written.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import PreTrainedTokenizerBase

from .atomic import MARK
from .checkpoint import Checkpoint
from .config_file import is_ours
from .containers import adapter_said
from .errors import ConversionError, shown
from .json_files import json_text, read_json
from .model_place import AROUND
from .module_pickles import as_safetensors, hold_the_same, is_of_module, safe_name
from .names import (
    HEADS,
    MODULE_PICKLE,
)
from .reasons import NOT_A_FILE, OF_THE_WAY_BACK, OLD_CARD, WRITTEN_ANEW, reason_for
from .sentence_modules import SentenceFiles, sentence_files
from .side_file_kinds import (
    MADE_BY_US,
    STORE,
    TOKENIZER_CONFIG,
    copy_file,
    digest,
    files_read,
    is_note,
    is_regular,
    same_bytes,
    stays,
)
from .sources import LISTED
from .tokenizers import MADE, check_readable, load, make_fast, rewritten


@dataclass
class SideFiles:
    """What became of the files next to the weights.

    Attributes:
        carried: names of those at their place.
        stored: names of those in `STORE`.
        written: name -> SHA-256 of files that the conversion wrote itself at a source's place; while they are as they
            were, the way back gives what the source had.
        inner, around: the folder that the model had, and names of those around it; see `laid_flat`.
        pickled: names of pickles, of modules of sentence-transformers, that the way back makes of the safetensors file
            in the same folder.
        left_out: reason -> names.
        is_recorded: whether `conversion.json` has all these names.
        notes: findings for the user.
        tokenizer: the source's, where it has one that loads.
    """

    carried: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    pickled: list[str] = field(default_factory=list)
    inner: str = ""
    around: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    is_recorded: bool = False
    notes: list[str] = field(default_factory=list)
    tokenizer: PreTrainedTokenizerBase | None = None

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a file is not carried, and why."""
        self.left_out.setdefault(reason, []).append(name)

    @property
    def record(self) -> dict[str, Any]:
        """The entries of `conversion.json`."""
        names = ("carried", "stored", "written", "pickled", "left_out", *(("inner", "around") if self.inner else ()))
        return {name: getattr(self, name) for name in names}

    @property
    def lines(self) -> list[str]:
        """A line for each reason why files were left out."""
        limit, where = (12, " (all in conversion.json)") if self.is_recorded else (LISTED, "")
        return [
            f"not carried, {reason}: {', '.join(map(shown, names[:limit]))}"
            + (f" and {len(names) - limit} more{where}" if len(names) > limit else "")
            for reason, names in sorted(self.left_out.items())
        ]


def carry_side_files(
    checkpoint: Checkpoint,
    names: Iterable[str],
    target: Path,
    changed: Callable[[], Mapping[str, Any]] | None = None,
) -> SideFiles:
    """Copy the files next to the weights of an official checkpoint, or of a repo of ours, into a repo.

    Args:
        checkpoint: the source.
        names: its files (`Source.names`).
        target: an existing folder.
        changed: gives name -> content of files of sentence-transformers that say something else in a repo of ours; not
            called if these files are left out.

    Raises:
        ConversionError: a file is damaged, or a link that leaves the folder; or sentencepiece is missing, and the
            tokenizer needs it.
    """
    result = SideFiles()
    of_sentences = sentence_files(checkpoint, names)
    if changed is not None and not of_sentences.problem:
        of_sentences = replace(of_sentences, places={**of_sentences.places, **changed()})
    result.notes += [of_sentences.problem] if of_sentences.problem else []
    done = {"config.json", TOKENIZER_CONFIG, MARK, *files_read(checkpoint)}
    for name in names:
        if name not in done and not (is_ours(checkpoint.config) and name.startswith(MADE_BY_US)):
            _carry(checkpoint, name, target, result, of_sentences)
    if checkpoint.around is not None:
        brought = (*result.carried, *result.stored, *result.pickled)
        result.inner = checkpoint.inner
        result.around = sorted({name for name in brought if not os.path.lexists(checkpoint.folder / name)})
    check_generation(checkpoint)
    if not checkpoint.is_file:
        check_readable(checkpoint.folder)
        result.tokenizer = load(checkpoint.folder)
        _write_tokenizer(checkpoint, target, result)
    return result


def _carry(checkpoint: Checkpoint, name: str, target: Path, result: SideFiles, of_sentences: SentenceFiles) -> None:
    """Carry or store one file; what is neither is for `name_the_rest`.

    Args:
        checkpoint, name: the source, and the file's name in it.
        target: the folder of the repo.
        result: where it is noted what became of the file.
        of_sentences: the files that sentence-transformers reads, which are stored if ours must not have them.
    """
    is_read = name in of_sentences.names and is_of_module(name)
    path = checkpoint.path(name)
    own_name = name if checkpoint.around is None else name.removeprefix(AROUND)
    if name.endswith("/") or not os.path.lexists(path):  # a folder as a whole; of a repo on the Hub, not fetched
        return
    if name in of_sentences.places and not of_sentences.problem:
        (target / name).write_text(json_text(of_sentences.places[name]), encoding="utf-8")
        result.written[name] = digest(target / name)
        if not is_ours(checkpoint.config):
            copy_file(checkpoint, name, target / STORE / name)
            result.stored.append(name)
    elif is_read and PurePosixPath(name).name == MODULE_PICKLE and not of_sentences.problem:
        carry_pickle(checkpoint, name, target, result)
    elif stays(name) or (is_read and not of_sentences.problem):
        copy_file(checkpoint, name, target / name)
        result.carried.append(name)
    elif not is_regular(path):
        return
    elif name in HEADS or (is_read and PurePosixPath(name).name == MODULE_PICKLE):
        as_safetensors(checkpoint, name, target / STORE / f"{name}.safetensors")
        result.stored.append(name)
    elif (
        is_ours(checkpoint.config) and not is_read and is_note(name, path)
    ):  # its name may be that of a file of the source
        copy_file(checkpoint, name, target / name)
        result.carried.append(name)
    elif is_read or is_note(own_name, path):
        copy_file(checkpoint, name, target / STORE / name)
        result.stored.append(name)


def name_the_rest(
    checkpoint: Checkpoint, names: Iterable[str], target: Path, result: SideFiles, done: Iterable[str] = ()
) -> None:
    """Leave out, with a reason, every file of the source that is not in the new folder.

    Args:
        checkpoint: the source.
        names: its files.
        target: the folder, in which all but the card is written.
        result: what is known of the files; gets the reasons.
        done: names of further files of the source that were read and are not missed.
    """
    named = {name for each in result.left_out.values() for name in each}
    done = {
        "config.json",
        MARK,
        *files_read(checkpoint),
        *result.carried,
        *result.stored,
        *result.written,
        *result.pickled,
        *done,
    }
    names = list(names)
    for name in names:
        path, copy = checkpoint.path(name), target / name
        if name in done or name in named:
            continue
        if name.endswith("/") or not os.path.lexists(path):
            result.leave_out(name, reason_for(name))
        elif not is_regular(path):
            result.leave_out(name, NOT_A_FILE)
        elif is_ours(checkpoint.config) and copy.is_file() and same_bytes(checkpoint.member(name), copy):
            result.carried.append(name)
        elif is_ours(checkpoint.config) and name == "README.md":
            result.leave_out(name, OLD_CARD)
        elif is_ours(checkpoint.config) and copy.is_file():
            result.leave_out(name, WRITTEN_ANEW)
        elif is_ours(checkpoint.config) and name.startswith(MADE_BY_US):
            result.leave_out(name, OF_THE_WAY_BACK)
        else:
            result.leave_out(name, reason_for(name))
    if len(names) >= LISTED:
        result.notes.append(f"the source has {LISTED} files or more; only so many were looked at")


def check_generation(checkpoint: Checkpoint) -> None:
    """Refuse damaged settings of generation, for which transformers would take others without a word."""
    if not checkpoint.is_file and os.path.lexists(checkpoint.folder / "generation_config.json"):
        read_json(checkpoint.member("generation_config.json"))


def _write_tokenizer(checkpoint: Checkpoint, target: Path, result: SideFiles) -> None:
    """Write `tokenizer_config.json`, and `tokenizer.json` where only a SentencePiece file is there."""
    tokenizer = result.tokenizer
    there = os.path.lexists(checkpoint.folder / TOKENIZER_CONFIG)
    settings = read_json(checkpoint.member(TOKENIZER_CONFIG)) if there else {}
    wanted, notes = rewritten(settings, tokenizer)
    result.notes += notes
    if there and wanted == settings:
        copy_file(checkpoint, TOKENIZER_CONFIG, target / TOKENIZER_CONFIG)
        result.carried.append(TOKENIZER_CONFIG)
    elif wanted:
        (target / TOKENIZER_CONFIG).write_text(json_text(wanted), encoding="utf-8")
        result.written[TOKENIZER_CONFIG] = digest(target / TOKENIZER_CONFIG)
    if there and wanted != settings and not is_ours(checkpoint.config):
        copy_file(checkpoint, TOKENIZER_CONFIG, target / STORE / TOKENIZER_CONFIG)
        result.stored.append(TOKENIZER_CONFIG)
    if tokenizer is not None and make_fast(tokenizer, checkpoint.folder, target):
        result.written[MADE] = digest(target / MADE)
        result.notes.append(
            "tokenizer.json was made from the SentencePiece file, so that it loads without sentencepiece"
        )


def carry_pickle(checkpoint: Checkpoint, name: str, target: Path, result: SideFiles) -> None:
    """Have the pickled weights of a module as a safetensors file, which the module reads first."""
    weights = safe_name(name)
    if not os.path.lexists(checkpoint.path(weights)):
        as_safetensors(checkpoint, name, target / weights)
        result.written[weights] = digest(target / weights)
        result.pickled.append(name)
    elif hold_the_same(checkpoint, name, weights):
        result.pickled.append(name)
    else:
        as_safetensors(checkpoint, name, target / STORE / f"{name}.safetensors")
        result.stored.append(name)


def refuse_adapters(folder: Path) -> None:
    """Refuse the folder of a PEFT adapter, whose weights are not a whole model.

    Raises:
        ConversionError: naming its base model.
    """
    if found := adapter_said(folder):
        raise ConversionError(f"{folder}: {found[0]}; {found[1]}")
