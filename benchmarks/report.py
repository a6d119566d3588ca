"""The measured rows as a Markdown table, as JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from machine import Machine
from workloads import Row


def markdown(machine: Machine, rows: list[Row]) -> str:
    """A table of milliseconds and ratios, under a line that names the machine and its limits."""
    gemm = ", ".join(f"{dtype} {value:,.0f}" for dtype, value in machine.gemm_gflops.items())
    lines = [
        f"{machine.processor}, {machine.threads} threads, torch {machine.torch}, transformers {machine.transformers}. "
        f"Measured limits: {machine.read_gbs:.0f} GB/s read, matrix product {gemm} GFLOPS.",
        "",
        "Milliseconds a token (decode, greedy, beam) or a forward pass (prefill, encoder), best / median; "
        "ratio = transformers / Blockformer.",
        "",
        "| shape | work | dtype | batch | context | Blockformer | transformers | ratio, best | ratio, median | limit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.shape} | {row.work} | {row.dtype} | {row.batch} | {row.context:,} "
            f"| {row.ours_min * 1e3:,.1f} / {row.ours_median * 1e3:,.1f} "
            f"| {row.peer_min * 1e3:,.1f} / {row.peer_median * 1e3:,.1f} "
            f"| {row.ratio_min:.2f} | {row.ratio_median:.2f} | {row.limit * 1e3:,.1f} |"
        )
    return "\n".join(lines) + "\n"


def write(folder: Path, machine: Machine, rows: list[Row]) -> None:
    """Write speed.md, speed.json and speed.png into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speed.md").write_text(markdown(machine, rows), encoding="utf-8")
    entries = [{**asdict(row), "ratio_min": row.ratio_min, "ratio_median": row.ratio_median} for row in rows]
    (folder / "speed.json").write_text(
        json.dumps({"machine": asdict(machine), "rows": entries}, indent=2) + "\n", encoding="utf-8"
    )
    draw(rows, folder / "speed.png")


def draw(rows: list[Row], path: Path) -> None:
    """Bars of the median ratio; the line at 1 is transformers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.35 * len(rows) + 1.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    shapes = [row.shape.partition(",")[0] for row in rows]
    labels = [
        f"{shape}: {row.work} {row.dtype}, batch {row.batch}, context {row.context:,}"
        for shape, row in zip(shapes, rows, strict=True)
    ]
    bars = axes.barh(range(len(rows)), [row.ratio_median for row in rows], color="tab:blue")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.1)
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="time of transformers / time of Blockformer (median)", title="Same weights, turn by turn")
    figure.savefig(path)
