"""The folder of compiled code and decisions: in the user's cache folder, if nobody else can write there."""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)


def cache_folder() -> Path:
    """`blockformer` in the user's cache folder (`XDG_CACHE_HOME` or ~/.cache).

    Raises:
        RuntimeError: this user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockformer"


def trusted_folder(to_write: bool = False) -> Path:
    """The cache folder, or one of this process for as long as it runs if others could put code into the first one.

    Args:
        to_write: the folder is to be written to, so that one of a read-only disk will not do.
    """
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
        if folder.stat().st_uid == os.getuid() and mode & 0o022:
            folder.chmod(mode & 0o755)
        if is_trusted(folder) and (not to_write or os.access(folder, os.W_OK)):
            return folder
        reason = f"{folder} belongs to another user, others can write into it, or this user cannot"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    logger.warning_once(f"compiled code is kept for this process only, because its folder cannot be used: {reason}")
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="blockformer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def is_trusted(path: Path) -> bool:
    """Whether only this user, or root, can have written a file or a folder."""
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


@functools.cache
def processor() -> tuple[str, str]:
    """The processor's name and its flags."""
    found = {"model name": os.uname().machine, "flags": os.uname().machine}
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        name = {"Features": "flags"}.get(name.strip(), name.strip())
        if name in found:
            found[name] = value.strip()
    return found["model name"], found["flags"]
