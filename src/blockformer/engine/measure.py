"""Whether fast paths are allowed, and whether each is faster on this processor: each question is measured once."""

import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock


def is_switched_on() -> bool:
    """Whether the environment allows fast paths: not with BLOCKFORMER_FAST=0."""
    return os.environ.get("BLOCKFORMER_FAST", "1") != "0"


def is_enabled() -> bool:
    """Whether fast paths are allowed: not with BLOCKFORMER_FAST=0, nor where somebody else looks at the operators.

    That is who traces a graph or counts operations (PyTorch's dispatch modes) in this thread; what other threads do
    says nothing.
    """
    if not is_switched_on() or torch.compiler.is_dynamo_compiling():
        return False
    return not torch.jit.is_tracing() and torch._C._len_torch_dispatch_stack() == 0


def is_exported() -> bool:
    """Whether this thread records a graph by `torch.export` or `torch.jit.trace`.

    `torch.compiler.is_compiling` by itself says whether any thread does. `torch.compile` may compile a function like
    this one by itself, so callers ask about that themselves.
    """
    fake = torch._C._TorchDispatchModeKey.FAKE
    is_fake = torch.compiler.is_compiling() and torch._C._get_dispatch_mode(fake) is not None
    return torch.jit.is_tracing() or is_fake


_lock = threading.RLock()  # one measurement may ask for another
_first: list[int] = []  # how many threads PyTorch had when this process first asked
_verdicts: dict[str, bool] = {}  # for so many, and for other numbers of them:
_with_other_threads: dict[int, dict[str, bool]] = {}


def _known() -> dict[str, bool]:
    """The answers of this process for the present number of threads."""
    threads = torch.get_num_threads()
    if not _first:
        _first.append(threads)
    return _verdicts if threads == _first[0] else _with_other_threads.setdefault(threads, {})


def is_measured(question: str, measure: Callable[[], bool]) -> bool:
    """The result of `measure`, which answers a question once on a machine: see `decisions_file`."""
    known = _known()
    if question not in known:
        with _lock:
            if question not in known:
                known[question] = _decided(question, measure)
    return known[question]


_file: list[Path] = []  # the file that `use_decisions` was given


def use_decisions(file: str | os.PathLike) -> None:
    """Read answers from this file, and keep new ones there, for all models of this process from now on.

    Raises:
        ValueError: the file is not one of decisions.
    """
    file = Path(file)
    try:
        text = file.read_text()
    except FileNotFoundError:
        text = ""
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if text.strip() and not _kept_in(file):
        raise ValueError(f"{file} is not a file of decisions: JSON such as {{machine: {{question: true}}}}.")
    with _lock:
        if _file != [file]:
            _file[:] = [file]
            for known in (_verdicts, *_with_other_threads.values()):
                known.clear()


def decisions_file() -> Path | None:
    """The file in which answers are kept, so that other processes compute alike: JSON, by machine and by question.

    It is what `use_decisions` was given. Otherwise `BLOCKFORMER_DECISIONS` names it, or says by an empty value that
    answers are of this process only. Otherwise it is `decisions.json` in the user's cache folder, if nobody else can
    write there.
    """
    if _file:
        return _file[0]
    named = os.environ.get("BLOCKFORMER_DECISIONS")
    if named is not None:
        return Path(named) if named else None
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / "decisions.json" if is_trusted(folder) else None
    except (OSError, RuntimeError):
        return None


def cache_folder() -> Path:
    """`blockformer` in the user's cache folder (`XDG_CACHE_HOME` or ~/.cache).

    Raises:
        RuntimeError: this user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockformer"


def is_trusted(path: Path) -> bool:
    """Whether only this user, or root, can have written a file or a folder."""
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


@functools.cache
def processor() -> tuple[str, str]:
    """The processor's name and its flags."""
    known = {"model name": os.uname().machine, "flags": os.uname().machine}
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        name = {"Features": "flags"}.get(name.strip(), name.strip())
        if name in known:
            known[name] = value.strip()
    return known["model name"], known["flags"]


def machine() -> str:
    """What answers depend on: the processor, the instructions that the libraries use, threads and PyTorch."""
    name, flags = processor()
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "all")
    able = f"{torch.backends.cpu.get_cpu_capability()}, oneDNN {most}, {hashlib.sha256(flags.encode()).hexdigest()[:8]}"
    return f"{name} ({able}), {torch.get_num_threads()} threads, torch {torch.__version__}"


def _decided(question: str, measure: Callable[[], bool]) -> bool:
    file, this = decisions_file(), machine()
    known = _kept_in(file).get(this, {}).get(question)
    if isinstance(known, bool):
        return known
    with torch.autocast("cpu", enabled=False):
        answer = measure()
    if file is None:
        return answer
    try:
        with FileLock(file.with_name(f".{file.name}.lock")):
            kept = _kept_in(file)
            answer = kept.setdefault(this, {}).setdefault(question, answer)  # of processes that measure, the first one
            made = file.with_name(f".{file.name}.{os.getpid()}")
            made.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
            os.replace(made, file)
    except OSError:  # of a folder that cannot be written to, or a full disk
        pass
    return bool(answer)


def _kept_in(file: Path | None) -> dict[str, dict[str, bool]]:
    """All answers of a file; none if there is no such file, or it is damaged."""
    try:
        kept = json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) and all(isinstance(each, dict) for each in kept.values()) else {}


def verdicts() -> dict[str, bool]:
    """All answers of this process so far, for the present number of threads."""
    return dict(_known())


def is_quicker(work: Callable, other: Callable, rounds: int, share: float = 0.9) -> bool:
    """Whether `work` takes less than that share of the other's time.

    They take turns and the best round of each counts, so other load on the machine matters little.
    """
    best = [float("inf")] * 2
    for _ in range(rounds):
        for index, each in enumerate((work, other)):
            start = time.perf_counter()
            each()
            best[index] = min(best[index], time.perf_counter() - start)
    return best[0] < share * best[1]


def random_matrix(*shape: int):
    """A seeded float32 matrix on the CPU, without touching the user's random state."""
    with torch.device("cpu"):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
