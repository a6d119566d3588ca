"""The measured rows as a Markdown table, as JSON and as a picture."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

from machine import Machine
from workloads import Row

MEASURED = {
    "seconds": "Milliseconds a token (decode, greedy, beam) or a piece of work (all others)",
    "bytes": "Peak memory in MB, each measurement in a process of its own",
}
SCALE = {"seconds": 1e3, "bytes": 1e-6}


def markdown(machine: Machine, rows: list[Row]) -> str:
    """Tables of milliseconds, of memory and of ratios, under a line that names the machine and its limits."""
    gemm = ", ".join(f"{dtype} {value:,.0f}" for dtype, value in machine.gemm_gflops.items())
    lines = [
        f"{machine.processor} ({machine.instructions}), {machine.threads} threads, torch {machine.torch}, "
        f"transformers {machine.transformers}. "
        f"Measured limits: {machine.read_gbs:.0f} GB/s read, matrix product {gemm} GFLOPS.",
    ]
    for unit, peer in dict.fromkeys((row.unit, row.peer) for row in rows):
        lines += [
            "",
            f"{MEASURED[unit]}, best / median; ratio = {peer} / Blockformer; {machine.instructions}.",
            "",
            f"| shape | work | dtype | batch | context | Blockformer | {peer} | ratio, best | ratio, median | limit |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [_line(row, SCALE[unit]) for row in rows if (row.unit, row.peer) == (unit, peer)]
    return "\n".join(lines) + "\n"


def _line(row: Row, scale: float) -> str:
    return (
        f"| {row.shape} | {row.work} | {row.dtype} | {row.batch or '-'} | {f'{row.context:,}' if row.context else '-'} "
        f"| {row.ours_min * scale:,.1f} / {row.ours_median * scale:,.1f} "
        f"| {row.peer_min * scale:,.1f} / {row.peer_median * scale:,.1f} "
        f"| {row.ratio_min:.2f} | {row.ratio_median:.2f} | {f'{row.limit * scale:,.1f}' if row.limit else '-'} |"
    )


def write(folder: Path, machine: Machine, rows: list[Row]) -> None:
    """Write speed.md, speed.json and speed.png into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speed.md").write_text(markdown(machine, rows), encoding="utf-8")
    entries = [{**asdict(row), "ratio_min": row.ratio_min, "ratio_median": row.ratio_median} for row in rows]
    record(folder / "speed.json", asdict(machine), entries)
    draw(rows, folder / "speed.png")


def record(path: Path, machine: dict, rows: list[dict]) -> None:
    """Write a run as `benchmarks/runs/` has it: when, by which command, on which machine, and what was measured."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    run = {"date": time.strftime("%Y-%m-%d"), "command": command, "machine": machine, "rows": rows}
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def draw(rows: list[Row], path: Path) -> None:
    """Bars of the median ratio; the line at 1 is the peer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.35 * len(rows) + 1.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    shapes = [row.shape.partition(",")[0] for row in rows]
    labels = [f"{shape}: {_label(row)}" for shape, row in zip(shapes, rows, strict=True)]
    bars = axes.barh(range(len(rows)), [row.ratio_median for row in rows], color="tab:blue")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.1)
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="transformers (or the tool named) / Blockformer, median", title="Same weights, turn by turn")
    figure.savefig(path)


def _label(row: Row) -> str:
    size = f", batch {row.batch}, context {row.context:,}" if row.batch else ""
    against = "" if row.peer.startswith("transformers") else f", compared with {row.peer}"
    return f"{row.work} {row.dtype}{size}{' (memory)' if row.unit == 'bytes' else ''}{against}"
