"""A folder, or a text file, that appears complete or not at all.

Everything is written to a temporary sibling folder and synced; one rename then puts it in place. An existing folder
is exchanged with the new one by `renameat2(RENAME_EXCHANGE)`, so the name always leads to one complete folder,
old or new, even after a kill or power cut.

Where that call is missing (outside Linux, on some network file systems), the old folder is first renamed to
`.<name>.<random>.old`; a kill between the two renames leaves both folders complete, but neither at the name.

Temporary folders (`.<name>.<random>.tmp`) of killed runs are never read again; they are safe to delete.
"""

import ctypes
import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from ..errors import ConversionError

SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2  # linux/fcntl.h, linux/fs.h


@contextmanager
def atomic_folder(
    target: str | PathLike[str], force: bool = False, sources: Iterable[str | PathLike[str]] = ()
) -> Iterator[Path]:
    """A temporary sibling folder to fill. It becomes `target` in one step if the block succeeds.

    Files get the permissions of the umask, whoever wrote them. If the block raises, nothing is left behind and an old
    target stays as it was.

    Args:
        target: the folder to create, with missing parents.
        force: replace an existing folder that is empty or holds a model.
        sources: folders being read. A target that is, contains, lies inside or shares hard-linked files with one of
            them is refused.

    Yields:
        The temporary folder.

    Raises:
        ConversionError: the target cannot be used, or writing failed (then the `OSError` is its cause).
    """
    target = Path(os.path.abspath(target))
    origins = [Path(source) for source in sources]
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    made: list[Path] = []
    try:
        check_target(target, force, origins)
        for parent in reversed(target.parents):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        temporary.mkdir()
        try:
            yield temporary
            _seal(temporary)
            _publish(temporary, target, force, origins)
        finally:  # this name is gone, or leads to what is not wanted any more: the unfinished folder or the old one
            shutil.rmtree(temporary, ignore_errors=True)
    except BaseException as error:
        for parent in reversed(made):
            with suppress(OSError):
                parent.rmdir()
        if not isinstance(error, OSError):
            raise
        fix = "; free some space and run it again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ConversionError(f"{target}: not written, nothing was changed: {error}{fix}") from error


def write_text(target: Path, text: str) -> None:
    """Write a file beside its place and rename it: a reader, or a kill, sees the old file or the new one."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        _sync(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(target: str | PathLike[str], force: bool, sources: Iterable[str | PathLike[str]]) -> None:
    """Check that a target may be written to; see `atomic_folder`.

    Raises:
        ConversionError: it may not.
    """
    target = Path(os.path.abspath(target))
    if not target.name:
        raise ConversionError(f"{target}: not a folder to write to; name another one")
    if target.is_symlink():
        raise ConversionError(f"{target}: a link; name the folder itself")
    there = os.path.lexists(target)
    if there and not target.is_dir():
        raise ConversionError(f"{target}: a file is there; name another folder")
    for source in sources:
        _check_apart(target, Path(source))
    if there and not force:
        raise ConversionError(f"{target}: exists already; name another folder, or replace it with force=True")
    if there and not _replaceable(target):
        raise ConversionError(f"{target}: holds no model, so force=True does not replace it; name another folder")
    if there and not (target.stat().st_mode & stat.S_IWUSR and os.access(target, os.W_OK)):  # root may write anywhere
        raise ConversionError(f"{target}: read-only; name another folder")


def _replaceable(folder: Path) -> bool:
    """Whether a folder is empty or holds a model, rather than being someone's home named by mistake."""
    names = os.listdir(folder)
    return not names or "config.json" in names or any(name.endswith((".safetensors", ".bin")) for name in names)


def _check_apart(target: Path, source: Path) -> None:
    """Refuse a target whose replacement would change the source, whatever names the two are given."""
    if _identity(source) in _lineage(target):
        raise ConversionError(f"{target}: is the source {source}, or lies in it; name another folder")
    if target.exists():
        if _identity(target) in _lineage(source):
            raise ConversionError(f"{target}: holds the source {source}; name another folder")
        if _files(target) & _files(source):
            raise ConversionError(f"{target}: shares hard-linked files with the source {source}; name another folder")


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _lineage(path: Path) -> set[tuple[int, int]]:
    """Identities of a path and of every folder above it that exists."""
    real = Path(os.path.realpath(path))
    return {_identity(folder) for folder in (real, *real.parents) if folder.exists()}


def _files(folder: Path) -> set[tuple[int, int]]:
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return {_identity(path) for path in paths if path.exists()}


def _seal(folder: Path) -> None:
    """Give everything in a folder the permissions of the umask, and sync it to the disk."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o777  # mkdir has just applied the umask to it
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(root, name)
            path.chmod(mode & 0o666)
            _sync(path)
        os.chmod(root, mode)
        _sync(Path(root))


def start_writing(descriptor: int) -> None:
    """Start writing a file's new pages to disk in the background (Linux only).

    The sync at the end then has little left to do. If the disk is slower than we are, this call waits for it, so dirty
    pages do not pile up.
    """
    if sys.platform == "linux":
        function = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if function is not None:
            function(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot sync a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_parent(target: Path) -> None:
    """Make a rename survive a power cut. The rename itself is done, so failing to open the parent is no error."""
    with suppress(OSError):
        _sync(target.parent)


def _publish(temporary: Path, target: Path, force: bool, sources: list[Path]) -> None:
    """Swap the temporary folder and the target in one step; what was there gets the temporary name."""
    if not os.path.lexists(target):
        try:
            if not _renameat2(temporary, target, RENAME_NOREPLACE):
                os.rename(temporary, target)  # fails if a folder with content has appeared
            _sync_parent(target)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    check_target(target, force, sources)  # another run may have put something there meanwhile
    if _renameat2(temporary, target, RENAME_EXCHANGE):
        _sync_parent(target)
        return
    aside = target.parent / f".{target.name}.{secrets.token_hex(4)}.old"
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except BaseException:
        os.rename(aside, target)
        raise
    _sync_parent(target)
    shutil.rmtree(aside, ignore_errors=True)


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """Linux's rename with a flag; False where the system or the file system lacks it."""
    if sys.platform != "linux":
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc >= 2.28
    if function is None:
        return False
    if function(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(target))
