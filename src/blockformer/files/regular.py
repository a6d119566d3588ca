"""Regular files, opened for reading without waiting for anything else."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that git-LFS has not fetched."""


def refuse_pointer(start: bytes, path: object) -> None:
    """Refuse a file that git-LFS has not fetched, by its first bytes.

    Raises:
        CheckpointError: it says what fetches the file.
    """
    if start.startswith(LFS_POINTER):
        raise CheckpointError(f"{path}: a git-LFS pointer, not the file itself; run `git lfs pull` in its folder")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered. FIFOs and devices are refused without waiting."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            file = open(descriptor, "rb", buffering=0)  # noqa: SIM115
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file
            file.close()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    raise CheckpointError(f"{path}: not a regular file")
