"""The files next to the weights: each one of the source is carried, converted, or named with the reason why it is not.

- What a repo is read with stays at its place: tokenizer, generation settings, chat templates, files that
  sentence-transformers reads; and licences, which travel with the weights.
- What has a file of ours at its place, and other small texts, lie in `conversion/source/`, for the way back.
- Everything else (code, other formats, second copies of the weights) is left out and named: whoever writes a repo
  calls `name_the_rest` at the end, which compares the source's files with what was written.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from ..errors import CheckpointError, ConversionError, shown
from . import pickled
from .atomic import MARK
from .checkpoint import Checkpoint
from .json_files import json_text, read_json
from .names import GENERATION, HEADS, LARGEST_NOTE, LEGAL, NOTES, SENTENCE_FILES, TOKENIZER_FILES, WEIGHTS, is_side_file
from .reasons import NOT_A_FILE, OF_THE_WAY_BACK, OLD_CARD, WRITTEN_ANEW, reason_for
from .regular import LFS_POINTER, open_regular
from .sentence_modules import sentence_files
from .sources import LISTED
from .tokenizers import MADE, check_readable, load, make_fast, rewritten

STORE = "conversion/source"
"""Where a repo keeps files of its source for the way back."""
TOKENIZER_CONFIG = "tokenizer_config.json"
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
MADE_BY_US = ("README.md", "conversion.json", "conversion/")
"""What the names begin with of files that only a repo of ours has, or has of its own."""


@dataclass
class SideFiles:
    """What became of the files next to the weights.

    Attributes:
        carried: names of those at their place.
        stored: names of those in `STORE`.
        written: name -> SHA-256 of files that the conversion wrote itself at a source's place; while they are as they
            were, the way back gives what the source had.
        left_out: reason -> names.
        is_recorded: whether `conversion.json` has all these names.
        notes: findings for the user.
        tokenizer: the source's, where it has one that loads.
    """

    carried: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
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
        names = ("carried", "stored", "written", "left_out")
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


def carry_side_files(checkpoint: Checkpoint, names: Iterable[str], target: Path) -> SideFiles:
    """Copy the files next to the weights of an official checkpoint, or of a repo of ours, into a repo.

    Args:
        checkpoint: the source.
        names: its files (`Source.names`).
        target: an existing folder.

    Raises:
        ConversionError: a file is damaged, or a link that leaves the folder; or sentencepiece is missing, and the
            tokenizer needs it.
    """
    result = SideFiles()
    of_sentences, problem = sentence_files(checkpoint, target)
    result.notes += [problem] if problem else []
    done = {"config.json", TOKENIZER_CONFIG, MARK, *_files_read(checkpoint)}
    for name in names:
        if name not in done and not (_is_ours(checkpoint) and name.startswith(MADE_BY_US)):
            _carry(checkpoint, name, target, result, set(of_sentences), bool(problem))
    if os.path.lexists(checkpoint.folder / "generation_config.json"):
        read_json(checkpoint.member("generation_config.json"))
    if not checkpoint.is_file:
        check_readable(checkpoint.folder)
        result.tokenizer = load(checkpoint.folder)
        _write_tokenizer(checkpoint, target, result)
    return result


def _carry(
    checkpoint: Checkpoint, name: str, target: Path, result: SideFiles, of_sentences: set[str], all_stored: bool
) -> None:
    """Carry or store one file; what is neither is for `name_the_rest`.

    Args:
        checkpoint, name: the source, and the file's name in it.
        target: the folder of the repo.
        result: where it is noted what became of the file.
        of_sentences: names of files that sentence-transformers reads and that are carried.
        all_stored: whether all files that it reads are stored, since ours cannot be read by it.
    """
    path = checkpoint.folder / name
    if name.endswith("/") or not os.path.lexists(path):  # a folder as a whole; of a repo on the Hub, not fetched
        return
    if stays(name) or name in of_sentences:
        _copy(checkpoint, name, target / name)
        result.carried.append(name)
    elif not _is_regular(path):
        return
    elif name in HEADS:
        _store_head(checkpoint, name, target)
        result.stored.append(name)
    elif _is_converted(name, target):
        result.carried.append(name)
    elif _is_ours(checkpoint) and is_note(name, path):  # its name may be that of a file which is kept of the source
        _copy(checkpoint, name, target / name)
        result.carried.append(name)
    elif is_note(name, path) or (all_stored and is_side_file(name) and not name.endswith(".bin")):
        _copy(checkpoint, name, target / STORE / name)
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
    done = {"config.json", MARK, *_files_read(checkpoint), *result.carried, *result.stored, *result.written, *done}
    names = list(names)
    for name in names:
        path, copy = checkpoint.folder / name, target / name
        if name in done or name in named:
            continue
        if name.endswith("/") or not os.path.lexists(path):
            result.leave_out(name, reason_for(name))
        elif not _is_regular(path):
            result.leave_out(name, NOT_A_FILE)
        elif _is_ours(checkpoint) and copy.is_file() and same_bytes(checkpoint.member(name), copy):
            result.carried.append(name)
        elif _is_ours(checkpoint) and name == "README.md":
            result.leave_out(name, OLD_CARD)
        elif _is_ours(checkpoint) and copy.is_file():
            result.leave_out(name, WRITTEN_ANEW)
        elif _is_ours(checkpoint) and name.startswith(MADE_BY_US):
            result.leave_out(name, OF_THE_WAY_BACK)
        else:
            result.leave_out(name, reason_for(name))
    if len(names) >= LISTED:
        result.notes.append(f"the source has {LISTED} files or more; only so many were looked at")


def _is_ours(checkpoint: Checkpoint) -> bool:
    return str(checkpoint.config.get("model_type", "")).startswith("blockformer_")


def _write_tokenizer(checkpoint: Checkpoint, target: Path, result: SideFiles) -> None:
    """Write `tokenizer_config.json`, and `tokenizer.json` where only a SentencePiece file is there."""
    tokenizer = result.tokenizer
    there = os.path.lexists(checkpoint.folder / TOKENIZER_CONFIG)
    settings = read_json(checkpoint.member(TOKENIZER_CONFIG)) if there else {}
    wanted, notes = rewritten(settings, tokenizer)
    result.notes += notes
    if there and wanted == settings:
        _copy(checkpoint, TOKENIZER_CONFIG, target / TOKENIZER_CONFIG)
        result.carried.append(TOKENIZER_CONFIG)
    elif wanted:
        (target / TOKENIZER_CONFIG).write_text(json_text(wanted), encoding="utf-8")
        result.written[TOKENIZER_CONFIG] = digest(target / TOKENIZER_CONFIG)
    if there and wanted != settings and not _is_ours(checkpoint):
        _copy(checkpoint, TOKENIZER_CONFIG, target / STORE / TOKENIZER_CONFIG)
        result.stored.append(TOKENIZER_CONFIG)
    if tokenizer is not None and make_fast(tokenizer, checkpoint.folder, target):
        result.written[MADE] = digest(target / MADE)
        result.notes.append("tokenizer.json was made of the SentencePiece file, so that it loads without sentencepiece")


def return_side_files(
    checkpoint: Checkpoint,
    names: Iterable[str],
    target: Path,
    record: Mapping[str, Any],
    unmissed: Iterable[str] = (),
) -> SideFiles:
    """Write the files next to the weights of a repo of ours into an official folder: what came, or what replaced it.

    Args:
        checkpoint: the repo.
        names: its files.
        target: an existing folder.
        record: `SideFiles.record` of the conversion that made the repo; empty for a model that was trained here.
        unmissed: names of further files that only our layout has, and that nobody will miss.

    Raises:
        ConversionError: a file is damaged, missing, or a link that leaves the folder.
    """
    result = SideFiles()
    names = set(names)
    stored = [name for name in record.get("stored", ()) if isinstance(name, str) and _is_plain(name)]
    written: Mapping[str, Any] = record.get("written", {})
    of_sentences, problem = sentence_files(checkpoint, target)
    result.notes += [problem] if problem else []
    own = {name for name in written if name in names and digest(checkpoint.member(name)) == written[name]}
    done = {"config.json", TOKENIZER_CONFIG, MARK, *own}
    for name in sorted(name for name in names - done if not name.startswith(MADE_BY_US)):
        path = checkpoint.folder / name
        is_text = is_note(name, path) and not (problem and name in SENTENCE_FILES)
        if (stays(name) or name in of_sentences or is_text) and _is_regular(path):
            _copy(checkpoint, name, target / name)
            result.carried.append(name)
    check_readable(checkpoint.folder)
    result.tokenizer = load(checkpoint.folder)
    if TOKENIZER_CONFIG in names - own:
        _return_tokenizer_config(checkpoint, target, result)
    for name in stored:
        if not os.path.lexists(target / name):  # else it was changed in the repo, and has been copied from there
            _return_stored(checkpoint, name, names, target)
            done.add(f"{STORE}/{name}{'.safetensors' * (name in HEADS)}")
    check_readable(target)
    name_the_rest(checkpoint, sorted(names), target, result, {*done, *unmissed})
    if left := record.get("left_out"):
        count = sum(len(each) for each in left.values())
        result.notes.append(f"not carried from the first source: {count} file{'s' * (count > 1)} (see conversion.json)")
    return result


def _return_tokenizer_config(checkpoint: Checkpoint, target: Path, result: SideFiles) -> None:
    settings = read_json(checkpoint.member(TOKENIZER_CONFIG))
    wanted, notes = rewritten(settings, result.tokenizer)
    result.notes += notes
    if wanted == settings:
        _copy(checkpoint, TOKENIZER_CONFIG, target / TOKENIZER_CONFIG)
    else:
        (target / TOKENIZER_CONFIG).write_text(json_text(wanted), encoding="utf-8")


def _return_stored(checkpoint: Checkpoint, name: str, names: set[str], target: Path) -> None:
    """Write a file that the repo keeps of its source to the place where it was."""
    if name in HEADS:
        _return_head(checkpoint, name, target)
    elif f"{STORE}/{name}" in names:
        _copy(checkpoint, f"{STORE}/{name}", target / name)
    else:
        raise ConversionError(
            f"{checkpoint.folder / STORE / name}: missing, and the official checkpoint had it; download the whole "
            "repo again, or delete conversion.json for a checkpoint without it"
        )


def copy_store(checkpoint: Checkpoint, names: Iterable[str], target: Path) -> None:
    """Copy what a repo of ours keeps of its source into another one."""
    for name in names:
        if name.startswith(f"{STORE}/"):
            _copy(checkpoint, name, target / name)


def stays(name: str) -> bool:
    """Whether a file has the same name and place in both layouts."""
    if name.startswith("additional_chat_templates/"):
        return name.endswith(".jinja") and name.count("/") == 1
    return (
        (name in TOKENIZER_FILES and name != TOKENIZER_CONFIG)
        or GENERATION.fullmatch(name) is not None
        or LEGAL.fullmatch(name) is not None
    )


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files hold the same."""
    return one.stat().st_size == other.stat().st_size and digest(one) == digest(other)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    result = hashlib.sha256()
    with open_regular(path) as file:
        while part := file.read(1 << 20):
            result.update(part)
    return result.hexdigest()


def _files_read(checkpoint: Checkpoint) -> set[str]:
    """The names of the files that hold the tensors, and of the index that names them."""
    files = {info.file.name for info in checkpoint.tensors.values()}
    indexes = {index for single, index in WEIGHTS if single not in files and single.split(".")[-1] in _endings(files)}
    return files | indexes


def _endings(files: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in files}


def _is_converted(name: str, target: Path) -> bool:
    """Whether it is the pickled projection of sentence-transformers, written as safetensors."""
    path = PurePosixPath(name)
    return path.name == "pytorch_model.bin" and len(path.parts) == 2 and (target / path.parent).is_dir()


def is_note(name: str, path: Path) -> bool:
    """Whether a file is a small text next to the model."""
    is_index = name.endswith((".index.json", "trainer_state.json"))
    return "/" not in name and name.endswith(NOTES) and not is_index and _size(path) <= LARGEST_NOTE


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a link that leads nowhere: opening it says so
        return 0


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return os.path.islink(path)  # one that leads nowhere: opening it says so


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and name.isprintable()


def _copy(checkpoint: Checkpoint, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(checkpoint.member(name)) as source, open(target, "xb") as copy:
        if source.read(len(LFS_POINTER)) == LFS_POINTER:
            path = checkpoint.folder / name
            raise CheckpointError(f"{path}: a git-LFS pointer, not the file itself; run `git lfs pull` there")
        source.seek(0)
        shutil.copyfileobj(source, copy)


def _store_head(checkpoint: Checkpoint, name: str, target: Path) -> None:
    """Store a pickled head as safetensors."""
    path = target / STORE / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = pickled.load(checkpoint.member(name))
    save_file({each: tensor.clone().contiguous() for each, tensor in tensors.items()}, path)


def _return_head(checkpoint: Checkpoint, name: str, target: Path) -> None:
    torch.save(load_file(checkpoint.member(f"{STORE}/{name}.safetensors")), target / name)


def refuse_adapters(folder: Path) -> None:
    """Refuse the folder of a PEFT adapter, whose weights are not a whole model.

    Raises:
        ConversionError: naming the file.
    """
    for name in ADAPTERS:
        if os.path.lexists(folder / name):
            raise ConversionError(f"{folder / name}: an adapter; merge it into its model (merge_and_unload) first")
