"""Prompts of several lengths: ours unprepared and prepared, plain and in 4 bits; transformers' is plain."""

from __future__ import annotations

from collections.abc import Iterator

import workloads
from rich.console import Console

WAYS = {
    "": lambda model: model,
    ", prepared": lambda model: model.prepare_for_inference(),
}


def rows(shape: workloads.Shape, dtypes, lengths: list[int], rounds: int, limits, console: Console):
    """A row for each dtype, plain or 4 bits, way and length."""
    for dtype in dtypes:
        for bits in ("", ", 4 bits"):
            pair = workloads.make_pair(shape, dtype)
            if bits:
                pair = workloads.in_four_bits(pair, shape)
                pair[0].prepare_for_training()
            yield from _measured(pair, shape, bits, lengths, rounds, limits, console)


def _measured(pair, shape, bits: str, lengths, rounds: int, limits, console) -> Iterator[workloads.Row]:
    ours, peer = pair
    for way, prepare in WAYS.items():
        with console.status(f"{shape.name}, prompts{bits}{way}, {peer.dtype}"):
            prepare(ours).eval()
            for length in lengths:
                few = rounds if length > 128 else 4 * rounds  # short ones are soon done
                yield workloads.prefill(pair, shape, length, few, limits.gemm_gflops, f"prompt{bits}{way}")
