"""Sizes from which a fast way of the engine is taken: each timed below, at and above its number, both ways in turns.

`python benchmarks/thresholds.py [--threads N] [--output FILE]` prints a table. A number is right if the ratio
(time of the plain way / of the fast way) passes 1 near it. The numbers themselves stand in the engine, each with a
comment that points here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import report
import torch
from machine import named
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from blockformer.engine import linear, packed
from blockformer.model.awq_linear import QuantizedLinear

STEPS = (0.25, 0.5, 1, 2, 4)
"""Of the number: below it, at it, above it."""
ROUNDS = 20
Pair = tuple[Callable[[], object], Callable[[], object]]


def by_parts(weights: int) -> Pair:
    """One float32 row times a weight of so many numbers."""
    inputs = 256
    outputs = max(16, weights // inputs // 16 * 16)
    states, held = torch.randn(1, inputs), [torch.randn(outputs, inputs) for _ in range(max(1, (1 << 23) // weights))]
    return _each(held, lambda weight: linear.in_parts(states, weight), lambda weight: F.linear(states, weight))


def by_onednn(work: int) -> Pair:
    """So many float32 multiplications: 32 rows and a square weight."""
    size = max(16, int((work / 32) ** 0.5))
    states, weight = torch.randn(32, size), torch.randn(size, size)
    return _each([weight], lambda each: linear.by_onednn(states, each), lambda each: F.linear(states, each))


def by_packed(weights: int) -> Pair:
    """8 float32 rows times a square weight of so many numbers."""
    size = int(weights**0.5)
    states, held = torch.randn(8, size), [torch.randn(size, size) for _ in range(max(1, (1 << 23) // weights))]
    pairs = [(each, packed.in_layout(each)) for each in held]
    return _each(pairs, lambda pair: linear.by_onednn(states, pair[1]), lambda pair: F.linear(states, pair[0]))


def by_float32(rows: int) -> Pair:
    """So many bfloat16 rows times 1,024 x 1,024 weights."""
    states, weight = torch.randn(max(1, rows), 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    return _each([weight], lambda each: linear._widened(states, each, None), lambda each: F.linear(states, each))


def by_four_bits(rows: int) -> Pair:
    """So many bfloat16 rows times 1,024 x 1,024 weights of 4 bits: PyTorch's matmul, or weights made for the call."""
    layer = QuantizedLinear(1024, 1024, False, 128)
    copy, states = linear.PackedCopy(layer), torch.randn(max(1, rows), 1024).bfloat16()
    copy.refresh()
    return _each([layer], lambda each: copy.multiply(states), lambda each: each.plain_product(states))


def _each(held: list, fast: Callable, plain: Callable) -> Pair:
    return (lambda: [fast(each) for each in held]), (lambda: [plain(each) for each in held])


THRESHOLDS: dict[str, tuple[int, Callable[[int], Pair]]] = {
    "linear._LEAST_IN_PARTS, weights": (linear._LEAST_IN_PARTS, by_parts),
    "linear._LEAST_WORK, multiplications": (linear._LEAST_WORK, by_onednn),
    "packed._LEAST_WEIGHTS[float32], weights": (packed._LEAST_WEIGHTS[torch.float32], by_packed),
    "linear._MANY_ROWS, rows": (linear._MANY_ROWS, by_float32),
    "linear.MOST_PACKED_ROWS, rows": (linear.MOST_PACKED_ROWS, by_four_bits),
}


@torch.no_grad()
def ratios() -> Iterator[tuple[str, int, list[float | None]]]:
    """For each number: its name, itself, and plain / fast at each of `STEPS`; None where this PyTorch lacks a way."""
    for name, (number, pair) in THRESHOLDS.items():
        found: list[float | None] = []
        for step in STEPS:
            try:
                fast, plain = pair(int(number * step))
                found.append(_ratio(fast, plain))
            except (AttributeError, RuntimeError, NotImplementedError):  # this PyTorch has no such product here
                found.append(None)
        yield name, number, found


def _ratio(fast: Callable, plain: Callable) -> float:
    """Of the best times of some rounds in turns, which other load on the machine touches least."""
    best = [float("inf")] * 2
    for _ in range(ROUNDS):
        for index, work in enumerate((fast, plain)):
            work()
            start = time.perf_counter()
            work()
            best[index] = min(best[index], time.perf_counter() - start)
    return best[1] / best[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the rows to this JSON file, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    machine, rows = named(), list(ratios())
    title = f"{machine['processor']}, {machine['instructions']}, {options.threads} threads"
    table = Table("number", "is", *(f"x {step}" for step in STEPS), title=title)
    for name, number, found in rows:
        table.add_row(name, f"{number:,}", *("-" if ratio is None else f"{ratio:.2f}" for ratio in found))
    Console(width=140).print(table)
    if options.output:
        entries = [{"name": name, "number": number, "ratios": found} for name, number, found in rows]
        report.record(options.output, machine, entries)


if __name__ == "__main__":
    main()
