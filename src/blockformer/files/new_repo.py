"""A new repo: built next to its place, checked, synced, and put into place in one step; and how it is written."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from .atomic import States, atomic_folder
from .errors import ConversionError, shown
from .json_files import read_json
from .model_place import folder_of_model
from .names import WEIGHT_NAMES
from .progress import Progress, silent
from .sizes import parse_size


def check_flag(name: str, value: Any) -> None:
    """Refuse anything but True and False: a text such as "no" would count as true.

    Raises:
        ConversionError: it is something else.
    """
    if not isinstance(value, bool):
        raise ConversionError(f"{name} must be True or False, not {shown(value)}")


@dataclass(frozen=True)
class RepoOptions:
    """How a repo is written; checked when it is made.

    Args:
        max_shard_size: largest size of one weight file, such as "5GB".
        force: replace a folder that Blockformer made, if nobody changed it.
        strict_finite: refuse NaN and infinite weights instead of reporting them.
        sign: a private key (PEM) to sign the repo with; see `blockformer.publishing.signing.sign`.
        progress: receives progress reports.

    Raises:
        ConversionError: one is of another kind.
    """

    max_shard_size: int | str = "5GB"
    force: bool = False
    strict_finite: bool = False
    sign: str | PathLike[str] | None = None
    progress: Progress = silent

    def __post_init__(self) -> None:
        check_flag("force", self.force)
        check_flag("strict_finite", self.strict_finite)
        parse_size(self.max_shard_size)


@contextmanager
def new_repo(
    target: str | PathLike[str],
    options: RepoOptions,
    sources: Iterable[str | PathLike[str]] = (),
    check_sources: Callable[[], None] = lambda: None,
    renewed: States | None = None,
) -> Iterator[Path]:
    """A folder to fill. If the block succeeds, it is checked and becomes `target`; else nothing is left behind.

    Args:
        target, sources, renewed: see `atomic_folder`.
        options: whether an old folder is replaced.
        check_sources: called at the end; raises if what was read has changed meanwhile.

    Yields:
        The folder to fill.

    Raises:
        ConversionError: the target cannot be used, or the repo is not whole; see `atomic_folder` and `check_whole`.
    """
    with atomic_folder(target, options.force, sources, renewed) as folder:
        yield folder
        check_whole(folder)
        check_sources()


def check_whole(folder: Path) -> None:
    """Check that a repo can be loaded: settings, all files of the weights, and the code that its settings name.

    An official folder may have its model in its own folder.

    Raises:
        ConversionError: naming what is missing or damaged.
    """
    folder /= folder_of_model(folder)
    settings = read_json(folder / "config.json")
    auto_map = settings.get("auto_map") or {}
    code = (target for target in auto_map.values() if isinstance(target, str) and "--" not in target)  # another repo's
    needed = {f"{target.partition('.')[0]}.py" for target in code}
    weights = [name for name in WEIGHT_NAMES if (folder / name).exists()]
    if not weights:
        needed.add(WEIGHT_NAMES[0])
    elif weights[0].endswith(".index.json"):
        needed |= set(read_json(folder / weights[0])["weight_map"].values())
    missing = sorted(name for name in needed if not (folder / name).is_file())
    if missing:
        raise ConversionError(f"{folder}: not written, since the new repo would lack {', '.join(missing)}")
