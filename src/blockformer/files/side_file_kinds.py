"""What a file next to the weights is, by its name and size; and how one is copied."""

import hashlib
import os
import shutil
import stat
from pathlib import Path, PurePosixPath

from .checkpoint import Checkpoint
from .names import (
    FEW_BITS,
    FURTHER_TEMPLATE,
    GENERATION,
    INDEX,
    LARGEST_NOTE,
    LEGAL,
    NOTES,
    TOKENIZER_FILES,
    VERSIONED_TOKENIZER,
)
from .regular import LFS_POINTER, open_regular, refuse_pointer

STORE = "conversion/source"
"""Where a repo keeps files of its source for the way back."""
TOKENIZER_CONFIG = "tokenizer_config.json"
MADE_BY_US = ("README.md", "conversion.json", "conversion/")
"""Beginnings of the names of files that a Blockformer repo does not take from its source."""


def stays(name: str) -> bool:
    """Whether a file has the same name and place in both layouts."""
    is_of_tokenizer = name in TOKENIZER_FILES and name != TOKENIZER_CONFIG
    kinds = (FURTHER_TEMPLATE, GENERATION, LEGAL, VERSIONED_TOKENIZER)
    return is_of_tokenizer or any(kind.fullmatch(name) for kind in kinds)


def is_note(name: str, path: Path) -> bool:
    """Whether a file is a small text next to the model."""
    is_other = INDEX.fullmatch(name) or name.endswith("trainer_state.json") or name in FEW_BITS
    return "/" not in name and name.endswith(NOTES) and not is_other and _size(path) <= LARGEST_NOTE


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a link that leads nowhere: opening it says so
        return 0


def is_regular(path: Path) -> bool:
    """Whether a path is a file, or a link that leads to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return os.path.islink(path)  # one that leads nowhere: opening it says so


def is_plain(name: str) -> bool:
    """Whether a name is that of a file inside a folder: relative, printable, without `..`."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and name.isprintable()


def files_read(checkpoint: Checkpoint) -> set[str]:
    """The names of the files that hold the tensors, and of the index that names them."""
    files = {info.file.name for info in checkpoint.tensors.values()}
    endings, pairs = {name.rpartition(".")[2] for name in files}, checkpoint.weights
    return files | {index for single, index in pairs if single not in files and single.split(".")[-1] in endings}


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


def copy_file(checkpoint: Checkpoint, name: str, target: Path) -> None:
    """Copy a file of the source to a path where nothing is.

    Raises:
        CheckpointError: it is a git-LFS pointer, or a link that leaves the folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(checkpoint.member(name)) as source, open(target, "xb") as copy:
        refuse_pointer(source.read(len(LFS_POINTER)), checkpoint.path(name))
        source.seek(0)
        shutil.copyfileobj(source, copy)
