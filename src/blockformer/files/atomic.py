"""A folder, or a text file, that appears complete or not at all.

Everything is written to a temporary sibling folder and synced; one rename then puts it in place. An existing folder
is exchanged with the new one by `renameat2(RENAME_EXCHANGE)`, so the name always leads to one complete folder,
old or new, even after a kill or power cut.

Where that call is missing (outside Linux, on some network file systems), the old folder is first renamed to
`.<name>.<random>.old`; a kill between the two renames leaves both folders complete, but neither at the name.

Temporary folders (`.<name>.<random>.tmp`) of killed runs are never read again; they are safe to delete.

A finished folder has a mark, `.blockformer.json`: names, sizes and times of the files that were written here. Only a
folder that holds just these, as they were written, is ever replaced, and only they are removed. A folder that is
renewed (`blockformer.upgrade`) keeps its owner's files, and its mark does not name them.
"""

import ctypes
import errno
import json
import os
import secrets
import shutil
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from .errors import ConversionError, shown
from .json_files import strict_json

MARK = ".blockformer.json"
LONGEST_MARK = 64 << 20
OF_OTHERS = {".git", ".gitattributes", ".cache", ".huggingface"}
"""Names that git and the Hub's client give. A mark with one of them is an early one, of a folder that was renewed."""
States = Mapping[str, list[int]]
"""Name -> size and time of change of each file in a folder; an empty folder has a "/" after its name."""
ATTEMPTS = 100
"""How often a folder is made whose parents others remove meanwhile."""
SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2  # linux/fcntl.h, linux/fs.h


@contextmanager
def atomic_folder(
    target: str | PathLike[str],
    force: bool = False,
    sources: Iterable[str | PathLike[str]] = (),
    renewed: States | None = None,
) -> Iterator[Path]:
    """A temporary sibling folder to fill. It becomes `target` in one step if the block succeeds.

    Files get the permissions of the umask, whoever wrote them. If the block raises, nothing is left behind and an old
    target stays as it was.

    Args:
        target: the folder to create, with missing parents.
        force: replace an existing folder that is empty, or that was made here and is as it was.
        sources: folders being read. A target that is, contains, lies inside or shares hard-linked files with one of
            them is refused.
        renewed: what is in the target (`states_of`), whoever wrote it, where the block puts into the new folder
            whatever must not be lost. The target is then replaced if it is still so. Permissions of these files and of
            folders stay, and the files are marked as written here only if they were marked so before.

    Yields:
        The temporary folder.

    Raises:
        ConversionError: the target cannot be used, or writing failed (then the `OSError` is its cause).
    """
    target = Path(os.path.abspath(target))
    origins = [Path(source) for source in sources]
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    new_parents: list[Path] = []
    try:
        check_target(target, force, origins, renewed)
        ours = {} if renewed is None else _written(target)
        _make(temporary, new_parents)
        made_here = None
        try:
            yield temporary
            made_here = _identity(temporary)
            mark(temporary, others=(renewed or {}).keys() - ours.keys())
            _seal(temporary, renewed)
            _publish(temporary, target, force, origins, renewed)
        finally:  # this name is gone, or leads to what is not wanted any more: the unfinished folder or the old one
            if temporary.exists() and made_here not in (None, _identity(temporary)):
                _remove(temporary, renewed)
            else:
                shutil.rmtree(temporary, ignore_errors=True)
    except BaseException as error:
        for parent in reversed(new_parents):
            with suppress(OSError):
                parent.rmdir()
        if not isinstance(error, OSError):
            raise
        fix = "; free some space and run it again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ConversionError(f"{target}: not written, nothing was changed: {error}{fix}") from error


def _make(folder: Path, new_parents: list[Path]) -> None:
    """Make a folder with its missing parents, which are noted; other runs may make and remove the same ones."""
    for attempt in range(ATTEMPTS):
        try:
            for parent in reversed(folder.parents):
                if not parent.exists():
                    with suppress(FileExistsError):
                        parent.mkdir()
                        new_parents.append(parent)
            folder.mkdir()
            return
        except FileNotFoundError:  # a run that failed has just removed a parent that it had made
            if attempt == ATTEMPTS - 1:
                raise


def write_text(target: Path, text: str) -> None:
    """Write a file next to its place and rename it: a reader, or a kill, sees the old file or the new one."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        _sync(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(
    target: str | PathLike[str],
    force: bool,
    sources: Iterable[str | PathLike[str]],
    renewed: States | None = None,
) -> None:
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
    if there and not force and renewed is None:
        raise ConversionError(f"{target}: already exists; name another folder, or replace it with force=True")
    if there and (problem := _why_kept(target, renewed)):
        raise ConversionError(f"{target}: {problem}")
    if there and not (target.stat().st_mode & stat.S_IWUSR and os.access(target, os.W_OK)):  # root may write anywhere
        raise ConversionError(f"{target}: read-only; name another folder")


def remove_folder(folder: Path) -> None:
    """Remove a folder that was made here; nothing happens if it is not there.

    Raises:
        ConversionError: it holds anything that was not written here, or was changed since.
    """
    if os.path.lexists(folder):
        check_target(folder, True, ())
        _remove(folder)


def mark(folder: Path, others: Iterable[str] = ()) -> None:
    """Write the mark of a folder: what this tool put there, which is everything but the files of `others`."""
    foreign = set(others)
    states = {name: state for name, state in states_of(folder).items() if name not in foreign}
    (folder / MARK).write_text(json.dumps({"files": states}, indent=1) + "\n", encoding="utf-8")


def states_of(folder: Path) -> dict[str, list[int]]:
    """The states of all files and empty folders in a folder, except for the mark itself."""
    states = {}
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in (*names, *links):
            path = Path(root, name)
            status = path.lstat()
            states[path.relative_to(folder).as_posix()] = [status.st_size, status.st_mtime_ns]
        if not folders and not names and Path(root) != folder:
            states[f"{Path(root).relative_to(folder).as_posix()}/"] = []
    states.pop(MARK, None)
    return states


def _marked(folder: Path) -> dict[str, list[int]] | None:
    """The states that a folder's mark tells of; None if it has no mark that can be read."""
    path = folder / MARK
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LONGEST_MARK:
            return None
        files = strict_json(path.read_bytes())["files"]
        return {str(name): list(state) for name, state in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _not_ours(marked: States) -> str | None:
    """A name in a mark of something that is never written here; None in a mark that can be believed."""
    return next((name for name in marked if not OF_OTHERS.isdisjoint(name.split("/"))), None)


def _written(folder: Path) -> States:
    """What was written here of a folder's files, and is as it was."""
    marked = _marked(folder) or {}
    if _not_ours(marked) is not None:
        return {}
    return {name: state for name, state in states_of(folder).items() if marked.get(name) == state}


def _why_kept(folder: Path, renewed: States | None = None) -> str:
    """Why a folder must not be replaced: somebody else's, or changed since it was made here; "" for one that may."""
    while True:
        before = _identity(folder)
        try:
            problem = _difference_to_mark(folder) if renewed is None else _difference(folder, renewed)
        except FileNotFoundError as error:
            problem = str(error)
        if _identity(folder) == before:
            break
        # another run has put a new folder there meanwhile
    if not problem:
        return ""
    if renewed is not None:
        return f"{problem}, while it was read; run this again when nothing writes to it"
    return f"{problem}, so force=True does not replace it; name another folder"


def _difference_to_mark(folder: Path) -> str:
    states, marked = states_of(folder), _marked(folder)
    if not states and not os.path.lexists(folder / MARK):
        return ""
    if marked is None:
        return f"was not made by Blockformer (it has no {MARK})"
    foreign = _not_ours(marked) or next((name for name in states if name not in marked), None)
    if foreign is not None:
        return f"holds {shown(foreign)}, which Blockformer did not write"
    changed = next((name for name, state in states.items() if state != marked[name]), None)
    return "" if changed is None else f"{shown(changed)} was changed since Blockformer wrote it"


def _difference(folder: Path, before: States) -> str:
    now = states_of(folder)
    changed = next((name for name in (*now, *before) if now.get(name) != before.get(name)), None)
    return "" if changed is None else f"{shown(changed)} was changed"


def _remove(folder: Path, states: States | None = None) -> None:
    """Remove the files of an old folder, as long as they match their states (None: the mark's). The rest stays."""
    known = (_marked(folder) or {}) if states is None else states
    with suppress(OSError):
        there = states_of(folder)
        others = {name for name, state in there.items() if known.get(name) != state}
        for name in there.keys() - others:
            if not name.endswith("/"):
                (folder / name).unlink()
        for root, folders, _ in os.walk(folder, topdown=False):
            for path in (Path(root, name) for name in folders):
                if f"{path.relative_to(folder).as_posix()}/" not in others:
                    with suppress(OSError):
                        path.rmdir()
        if not states_of(folder):
            (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()
    if folder.exists():
        warnings.warn(f"{folder}: files appeared in the old folder while it was replaced; they are here", stacklevel=3)


def _check_apart(target: Path, source: Path) -> None:
    """Refuse a target whose replacement would change the source, whatever names the two are given."""
    if _identity(source) in _lineage(target):
        raise ConversionError(f"{target}: is the source {source}, or is inside it; name another folder")
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
    return _identities((real, *real.parents))


def _files(folder: Path) -> set[tuple[int, int]]:
    return _identities(Path(root, name) for root, _, names in os.walk(folder) for name in names)


def _identities(paths: Iterable[Path]) -> set[tuple[int, int]]:
    """The identities of paths that exist; other runs may remove some meanwhile."""
    found = set()
    for path in paths:
        with suppress(OSError):
            found.add(_identity(path))
    return found


def _seal(folder: Path, renewed: States | None) -> None:
    """Set the permissions of new files by the umask, and sync everything to the disk."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o777  # mkdir has just applied the umask to it
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(root, name)
            if renewed is None or path.relative_to(folder).as_posix() not in renewed:
                path.chmod(mode & 0o666)
            _sync(path)
        if renewed is None:
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
    """Make a rename survive a power cut. The rename itself is done, so failing to open the parent is not an error."""
    with suppress(OSError):
        _sync(target.parent)


def _publish(temporary: Path, target: Path, force: bool, sources: list[Path], renewed: States | None) -> None:
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
    check_target(target, force, sources, renewed)  # another run may have put something there meanwhile
    if _renameat2(temporary, target, RENAME_EXCHANGE):
        if problem := _why_kept(temporary, renewed):  # it appeared after the check
            _renameat2(temporary, target, RENAME_EXCHANGE)
            raise ConversionError(f"{target}: {problem}")
        _sync_parent(target)
        return
    aside = target.parent / f".{target.name}.{secrets.token_hex(4)}.old"
    os.rename(target, aside)
    try:
        if problem := _why_kept(aside, renewed):
            raise ConversionError(f"{target}: {problem}")
        os.rename(temporary, target)
    except BaseException:
        os.rename(aside, target)
        raise
    _sync_parent(target)
    _remove(aside, renewed)


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
