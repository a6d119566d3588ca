"""The runs of an experiment, trained one after another; their folder is all that processes share.

FOLDER/experiment.json      what all rows have in common
FOLDER/blocks/NAME.py       blocks of one's own that the experiment names, as they were registered
FOLDER/runs/NAME.json       the row of a finished run
FOLDER/runs/NAME/           checkpoints of an unfinished run, and the lock of the process that trains it
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from ..files.atomic import write_text
from ..model.axes import BLOCKS as REGISTERED
from .experiment import Experiment, LabError, Run
from .one_run import config_of, train
from .text import Text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

EXPERIMENT, RUNS, ROWS, BLOCKS = "experiment.json", "runs", "rows.jsonl", "blocks"


def open_folder(folder: Path, experiment: Experiment, text: Text) -> None:
    """Make the folder of an experiment, or check that the one that is there belongs to it.

    Raises:
        LabError: it holds another experiment, or something else.
    """
    common = {**experiment.common(), "text": text.digest}
    try:
        there = json.loads((folder / EXPERIMENT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.exists() and not _is_new(folder):
            raise LabError(f"{folder} is not an experiment's folder: choose another --output") from None
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        write_text(folder / EXPERIMENT, json.dumps(common, indent=1) + "\n")
        there = common
    except (OSError, ValueError) as error:
        raise LabError(f"{folder / EXPERIMENT} cannot be read: {error}") from error
    if there != common:
        differing = [name for name in common if there.get(name) != common[name]]
        told = "; ".join(f"{name} is {there.get(name)} there and {common[name]} here" for name in differing)
        raise LabError(f"{folder} is the folder of another experiment: {told}. Choose another --output")
    _keep_blocks(folder, [Path(path).name for path in experiment.blocks])


def _keep_blocks(folder: Path, names: list[str]) -> None:
    """Copies of the blocks, so that the runs can be repeated from the folder.

    Raises:
        LabError: there is another file of this name from earlier runs.
    """
    sources = {each.file: each.source for values in REGISTERED.values() for each in values.values()}
    for name in names:
        path = folder / BLOCKS / name
        if path.exists() and path.read_bytes() != sources[name]:
            fix = "name the new block otherwise, or choose another --output"
            raise LabError(f"{path} is another block of this name, which earlier runs were trained with: {fix}")
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_text(path, sources[name].decode("utf-8"))


def _is_new(folder: Path) -> bool:
    """Whether it is empty, apart from what another process is just putting there."""
    return folder.is_dir() and all(
        path.name == RUNS or path.name.startswith(f".{EXPERIMENT}.") for path in folder.iterdir()
    )


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all finished runs; without their folder, the rows that a report has gathered in one file.

    Raises:
        LabError: one of the files is damaged.
    """
    if not (folder / RUNS).is_dir():
        path = folder / ROWS
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return [_row(path, line, "restore it") for line in lines]
    return [
        _row(path, path.read_text(encoding="utf-8"), "delete it, and its run is made again")
        for path in sorted((folder / RUNS).glob("*.json"))
    ]


def _row(path: Path, text: str, fix: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise LabError(f"{path} is damaged ({error}): {fix}") from error
    if not isinstance(row, dict):
        raise LabError(f"{path} holds no row: {fix}")
    return row


@contextlib.contextmanager
def _alone(scratch: Path, is_sharded: bool) -> Iterator[bool]:
    """Whether this process holds the lock of a run. The lock ends with the process, however that ends."""
    scratch.mkdir(parents=True, exist_ok=True)
    with open(scratch / "lock", "w") as lock:
        try:
            if fcntl is None:
                raise OSError("this system has no such locks")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if not is_sharded:
                fix = "give each process its own --shard"
                raise LabError(f"no file can be locked in {scratch.parent} ({error}): {fix}") from None
        yield True


def run_all(
    experiment: Experiment,
    runs: list[Run],
    folder: Path,
    text: Text,
    is_sharded: bool,
    tell: Callable[[Run, str, float], None],
) -> list[str]:
    """Train the runs that are not finished and that no other process is training.

    Args:
        experiment: read and checked.
        runs: the runs of this process.
        folder: what `open_folder` has opened.
        text: the experiment's.
        is_sharded: whether no other process has the same runs.
        tell: called with a run, its news ("", "resumed", "finished", "there already" or "elsewhere") and the share of
            it that is done.

    Returns:
        The names of the runs that other processes are training.
    """
    process, elsewhere = PartialState(), []
    for run in runs:
        with contextlib.ExitStack() as stack:
            state = [""]
            if process.is_main_process:
                state = [_state(run, folder, is_sharded, stack)]
            if process.num_processes > 1:
                broadcast_object_list(state)
            if state[0]:
                tell(run, state[0], 1.0)
                elsewhere += [run.name] if state[0] == "elsewhere" else []
                continue
            scratch = folder / RUNS / run.name
            row = train(experiment, run, text, scratch, functools.partial(tell, run))
            if process.is_main_process:
                write_text(folder / RUNS / f"{run.name}.json", json.dumps(row) + "\n")
                shutil.rmtree(scratch, ignore_errors=True)
            process.wait_for_everyone()
            tell(run, "finished", 1.0)
    return elsewhere


def _state(run: Run, folder: Path, is_sharded: bool, stack: contextlib.ExitStack) -> str:
    """Why not to train a run here; "" to train it, and then it stays locked until the stack is closed."""
    row = folder / RUNS / f"{run.name}.json"
    if not row.exists() and not stack.enter_context(_alone(folder / RUNS / run.name, is_sharded)):
        return "elsewhere"
    if not row.exists():  # it may have been finished before the lock was ours
        return ""
    if json.loads(row.read_text(encoding="utf-8"))["config"] != config_of(run):
        raise LabError(f"{row} belongs to another config of this name: rename yours, or choose another --output")
    return "there already"
