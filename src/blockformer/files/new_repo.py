"""The one way to write a repo: built next to its place, checked, synced, and put into place in one step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from .atomic import atomic_folder
from .errors import ConversionError
from .json_files import read_json
from .model_place import folder_of_model
from .names import WEIGHTS


@contextmanager
def new_repo(
    target: str | PathLike[str],
    *,
    force: bool = False,
    sources: Iterable[str | PathLike[str]] = (),
    check_sources: Callable[[], None] | None = None,
) -> Iterator[Path]:
    """A folder to fill. If the block succeeds, it is checked and becomes `target`; else nothing is left behind.

    Args:
        target, force, sources: see `atomic_folder`.
        check_sources: called at the end; raises if what was read has changed meanwhile.

    Yields:
        The folder to fill.

    Raises:
        ConversionError: the target cannot be used, or the repo is not whole; see `atomic_folder` and `check_whole`.
    """
    with atomic_folder(target, force=force, sources=sources) as folder:
        yield folder
        check_whole(folder)
        if check_sources is not None:
            check_sources()


def check_whole(folder: Path) -> None:
    """Check that a repo can be loaded: settings, all files of the weights, and the code that its settings name.

    An official folder may have its model in a folder of its own.

    Raises:
        ConversionError: naming what is missing or damaged.
    """
    folder /= folder_of_model(folder)
    settings = read_json(folder / "config.json")
    auto_map = settings.get("auto_map") or {}
    code = (target for target in auto_map.values() if isinstance(target, str) and "--" not in target)  # another repo's
    needed = {f"{target.partition('.')[0]}.py" for target in code}
    weights = [name for pair in WEIGHTS for name in pair if (folder / name).exists()]
    if not weights:
        needed.add(WEIGHTS[0][0])
    elif weights[0].endswith(".index.json"):
        needed |= set(read_json(folder / weights[0])["weight_map"].values())
    missing = sorted(name for name in needed if not (folder / name).is_file())
    if missing:
        raise ConversionError(f"{folder}: not written, since the new repo would lack {', '.join(missing)}")
