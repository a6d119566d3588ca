"""Whether fast paths are allowed, and whether each is faster on this processor: each question is measured once."""

import os
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import contextmanager

import torch


def is_enabled() -> bool:
    """Whether fast paths are allowed: not with BLOCKFORMER_FAST=0, and not while somebody else traces a graph."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return os.environ.get("BLOCKFORMER_FAST", "1") != "0" and (not is_traced or is_own_trace())


_own = threading.local()


def is_own_trace() -> bool:
    """Whether this thread traces a graph of the engine's own."""
    return hasattr(_own, "trace")


def reads_packed_copies() -> bool:
    """Whether this thread traces a graph of the engine's own that will read packed copies of weights."""
    return getattr(_own, "packed_copies", False)


@contextmanager
def own_trace(packed_copies: bool = False):
    """While it lasts, this thread traces a graph of the engine's own, which the fast paths go into.

    Args:
        packed_copies: the graph will read packed copies of the weights that oneDNN multiplies by.
    """
    _own.trace, _own.packed_copies = True, packed_copies
    try:
        yield
    finally:
        del _own.trace, _own.packed_copies


_lock = threading.RLock()  # one measurement may ask for another
_verdicts: dict[Hashable, bool] = {}


def is_measured(question: Hashable, measure: Callable[[], bool]) -> bool:
    """The result of `measure`, which answers a question once per process."""
    if question not in _verdicts:
        with _lock:
            if question not in _verdicts:
                with torch.autocast("cpu", enabled=False):
                    _verdicts[question] = measure()
    return _verdicts[question]


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


# Float32 weights that a product is timed by: more than most caches hold where few rows read them, fewer for many rows.
_READ, _MULTIPLIED = 1 << 23, 1 << 21
MANY_ROWS = 64
"""What stands for all numbers of rows that are not few."""


def some_weights(rows: int, outputs: int, inputs: int) -> list:
    """Float32 matrices [outputs or fewer, inputs] like a model's, to time products of so many rows by."""
    most = _READ if rows < MANY_ROWS else _MULTIPLIED
    if outputs > (whole := max(1024, most // inputs // 16 * 16)):
        outputs = whole  # of a large head a part, which is still like it
    # All random would take longer than the timing; no two rows or states begin with the same numbers.
    size, block = outputs * inputs, random_matrix(4099).flip(0)
    first = block.repeat(size // len(block) + 1)[:size].view(outputs, inputs)
    return [first, *(first.clone() for _ in range(most // size - 1))] if rows < MANY_ROWS else [first]


def random_matrix(*shape: int):
    """A seeded float32 matrix on the CPU, without touching the user's random state."""
    with torch.device("cpu"):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
