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
from .errors import shown
from .json_files import json_text, read_json
from .model_place import AROUND
from .module_pickles import as_safetensors, hold_the_same, is_of_module, safe_name
from .names import HEADS, MODULE_PICKLE, TEKKEN
from .reasons import NOT_A_FILE, ODD_NAME, OF_THE_WAY_BACK, OLD_CARD, WRITTEN_ANEW, reason_for
from .sentence_modules import SentenceFiles, sentence_files
from .side_file_kinds import (
    MADE_BY_US,
    STORE,
    TOKENIZER_CONFIG,
    copy_file,
    digest,
    files_read,
    is_note,
    is_plain,
    is_regular,
    same_bytes,
    stays,
)
from .sources import LISTED
from .tokenizers import MADE, check_readable, load, make_fast, rewritten, usual_class


@dataclass
class SideFiles:
    """What becomes of the files next to the weights.

    Attributes:
        checkpoint: the source.
        folder: the new folder, which exists.
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

    checkpoint: Checkpoint
    folder: Path
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

    def carry(self, name: str) -> None:
        """Copy a file of the source to its place.

        Raises:
            CheckpointError: see `copy_file`.
        """
        copy_file(self.checkpoint, name, self.folder / name)
        self.carried.append(name)

    def store(self, name: str) -> None:
        """Copy a file of the source into `STORE`, for the way back; pickled weights as a safetensors file."""
        if name in HEADS or PurePosixPath(name).name == MODULE_PICKLE:
            as_safetensors(self.checkpoint, name, self.folder / STORE / f"{name}.safetensors")
        else:
            copy_file(self.checkpoint, name, self.folder / STORE / name)
        self.stored.append(name)

    def carry_pickle(self, name: str) -> None:
        """Have the pickled weights of a module as a safetensors file, which the module reads first."""
        weights = safe_name(name)
        if not os.path.lexists(self.checkpoint.path(weights)):
            as_safetensors(self.checkpoint, name, self.folder / weights)
            self.written[weights] = digest(self.folder / weights)
            self.pickled.append(name)
        elif hold_the_same(self.checkpoint, name, weights):
            self.pickled.append(name)
        else:
            self.store(name)

    def write(self, name: str, text: str) -> None:
        """Write a file of the conversion's own."""
        (self.folder / name).write_text(text, encoding="utf-8")
        self.written[name] = digest(self.folder / name)

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a file is not carried, and why."""
        self.left_out.setdefault(reason, []).append(name.encode("utf-8", "backslashreplace").decode())

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
    """Copy the files next to the weights of an official checkpoint, or of a Blockformer repo, into a repo.

    Args:
        checkpoint: the source.
        names: its files (`Source.names`).
        target: an existing folder.
        changed: gives name -> content of files of sentence-transformers that say something else in our repos; not
            called if these files are left out.

    Raises:
        ConversionError: a file is damaged, or a link that leaves the folder; or sentencepiece is missing, and the
            tokenizer needs it.
    """
    result = SideFiles(checkpoint, target)
    of_sentences = sentence_files(checkpoint, names)
    if changed is not None and not of_sentences.problem:
        of_sentences = replace(of_sentences, places={**of_sentences.places, **changed()})
    result.notes += [of_sentences.problem] if of_sentences.problem else []
    done = {"config.json", TOKENIZER_CONFIG, MARK, *files_read(checkpoint)}
    for name in names:
        if name not in done and not (is_ours(checkpoint.config) and name.startswith(MADE_BY_US)):
            _carry(result, name, of_sentences)
    if checkpoint.around is not None:
        brought = (*result.carried, *result.stored, *result.pickled)
        result.inner = checkpoint.inner
        result.around = sorted({name for name in brought if not os.path.lexists(checkpoint.folder / name)})
    check_generation(checkpoint)
    if not checkpoint.is_file:
        check_readable(checkpoint.folder)
        result.tokenizer = load(checkpoint.folder)
        write_tokenizer_config(result)
        if TEKKEN in result.carried and MADE in result.carried:
            result.notes.append(f"tokenizer: {MADE} is read; with mistral-common, the source's class reads {TEKKEN}")
        if result.tokenizer is not None and make_fast(result.tokenizer, checkpoint.folder, target):
            result.written[MADE] = digest(target / MADE)
            result.notes.append(
                "tokenizer.json was made from the SentencePiece file, so that it loads without sentencepiece"
            )
    return result


def _carry(result: SideFiles, name: str, of_sentences: SentenceFiles) -> None:
    """Carry or store one file; what is neither is for `name_the_rest`.

    Args:
        result: where it is noted what became of the file.
        name: the file's name in the source.
        of_sentences: the files that sentence-transformers reads, which are stored if ours must not have them.
    """
    checkpoint, problem = result.checkpoint, of_sentences.problem
    is_read, of_ours = name in of_sentences.names and is_of_module(name), is_ours(checkpoint.config)
    path = checkpoint.path(name)
    own_name = name if checkpoint.around is None else name.removeprefix(AROUND)
    if not is_plain(name):
        return
    if name.endswith("/") or not os.path.lexists(path):  # a folder as a whole; of a repo on the Hub, not fetched
        return
    if name in of_sentences.places and not problem:
        result.write(name, json_text(of_sentences.places[name]))
        if not of_ours:
            result.store(name)
    elif is_read and PurePosixPath(name).name == MODULE_PICKLE and not problem:
        result.carry_pickle(name)
    elif stays(name) or (is_read and not problem):
        result.carry(name)
    elif not is_regular(path):
        return
    elif of_ours and name not in HEADS and not is_read and is_note(name, path):
        result.carry(name)  # its name may be that of a file of the source
    elif name in HEADS or is_read or is_note(own_name, path):
        result.store(name)


def name_the_rest(result: SideFiles, names: Iterable[str], done: Iterable[str] = ()) -> None:
    """Leave out, with a reason, every file of the source that is not in the new folder.

    Args:
        result: what is known of the files; gets the reasons. In its folder all but the card is written.
        names: the source's files.
        done: names of further files of the source that were read and are not missed.
    """
    checkpoint, of_ours = result.checkpoint, is_ours(result.checkpoint.config)
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
        path, copy = checkpoint.path(name), result.folder / name
        if name in done or name in named:
            continue
        if name.endswith("/") or not os.path.lexists(path):
            result.leave_out(name, reason_for(name))
        elif not is_plain(name):
            result.leave_out(name, ODD_NAME)
        elif not is_regular(path):
            result.leave_out(name, NOT_A_FILE)
        elif of_ours and copy.is_file() and same_bytes(checkpoint.member(name), copy):
            result.carried.append(name)
        elif of_ours and name == "README.md":
            result.leave_out(name, OLD_CARD)
        elif of_ours and copy.is_file():
            result.leave_out(name, WRITTEN_ANEW)
        elif of_ours and name.startswith(MADE_BY_US):
            result.leave_out(name, OF_THE_WAY_BACK)
        else:
            result.leave_out(name, reason_for(name))
    if len(names) >= LISTED:
        result.notes.append(f"the source has {LISTED} files or more; only so many were looked at")


def check_generation(checkpoint: Checkpoint) -> None:
    """Refuse damaged settings of generation, for which transformers would take others without a word."""
    if not checkpoint.is_file and os.path.lexists(checkpoint.folder / "generation_config.json"):
        read_json(checkpoint.member("generation_config.json"))


def write_tokenizer_config(result: SideFiles) -> None:
    """Write `tokenizer_config.json` as a Blockformer repo has it; see `rewritten`."""
    checkpoint = result.checkpoint
    there = os.path.lexists(checkpoint.folder / TOKENIZER_CONFIG)
    settings = read_json(checkpoint.member(TOKENIZER_CONFIG)) if there else {}
    wanted, notes = rewritten(settings, result.tokenizer)
    is_unnamed = result.tokenizer is None and "tokenizer_class" not in wanted
    if is_unnamed and (usual := usual_class(checkpoint.folder, checkpoint.config)):
        wanted["tokenizer_class"] = usual
        notes.append(f"tokenizer_config.json: names {usual}, which cannot be loaded here; a package may be missing")
    result.notes += notes
    if there and wanted == settings:
        result.carry(TOKENIZER_CONFIG)
        return
    if wanted:
        result.write(TOKENIZER_CONFIG, json_text(wanted))
    if there and not is_ours(checkpoint.config):
        result.store(TOKENIZER_CONFIG)
