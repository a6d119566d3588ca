"""The results of an experiment, made only from its rows: table, plots, page."""

from __future__ import annotations

import json
from pathlib import Path

from ..files.atomic import write_text
from .experiment import LabError, Run
from .intervals import CONFIDENCE, PowerLaw, power_law
from .page import page
from .plots import Point, draw_curves, draw_differences, draw_scaling
from .runs import ROWS, RUNS, read_rows
from .table import EXPLAINED, Group, group_rows, markdown, signed

TABLE, PAGE = "table.md", "index.html"
# Heading -> file.
PICTURES = {"Compared with the base": "differences.svg", "Loss by FLOPs": "curves.svg", "Power law": "scaling.svg"}


def write_report(folder: Path, runs: list[Run], name: str) -> list[Group]:
    """Write the report of all rows that are there, whichever process made them.

    Args:
        folder: the experiment's.
        runs: all runs of the experiment, for their order.
        name: the experiment's, for the page.

    Raises:
        LabError: no run has finished yet.
    """
    rows = read_rows(folder)
    if not rows:
        raise LabError(f"{folder} has no finished run yet")
    groups = group_rows(rows, list(dict.fromkeys(run.group for run in runs)))
    if (folder / RUNS).is_dir():
        write_text(folder / ROWS, "".join(json.dumps(row) + "\n" for group in groups for row in group.rows))
    laws = scaling(groups)
    drawn = (draw_differences(groups), draw_curves(_of_one_width(groups)), draw_scaling(laws) if laws else None)
    pictures = {heading: svg for heading, svg in zip(PICTURES, drawn, strict=True) if svg}
    sentences = [*notes(groups), *(law_in_words(name, law) for name, (_, law) in laws.items())]
    for heading, file in PICTURES.items():
        if heading in pictures:
            write_text(folder / file, pictures[heading])
        else:
            (folder / file).unlink(missing_ok=True)
    write_text(folder / TABLE, markdown(groups, sentences))
    write_text(folder / PAGE, page(name, groups, pictures, [EXPLAINED.format(confidence=CONFIDENCE), *sentences]))
    return groups


def _of_one_width(groups: list[Group]) -> list[Group]:
    """The groups of the width with the most configs: curves are compared at one width."""
    widths = [group.first["width"] for group in groups]
    most = max(widths, key=widths.count)
    return [group for group in groups if group.first["width"] == most]


def scaling(groups: list[Group]) -> dict[str, tuple[list[Point], PowerLaw]]:
    """Config -> its points (FLOPs of a run, bits per byte) and the power law, of each that ran at several widths."""
    ladders: dict[str, list[Group]] = {}
    for group in groups:
        ladders.setdefault(group.first["variant"], []).append(group)
    laws = {}
    for name, ladder in ladders.items():
        rows = [row for group in ladder for row in group.rows if row["bits_per_byte"] is not None]
        points = [(row["flops"], row["bits_per_byte"]) for row in rows]
        if len({group.first["width"] for group in ladder}) > 1 and len({flops for flops, _ in points}) > 1:
            laws[name] = points, power_law(*map(list, zip(*points, strict=True)))
    return laws


def law_in_words(name: str, law: PowerLaw) -> str:
    """The fit of one config."""
    return (
        f"{name}: bits per byte = {law.factor:.4g} * FLOPs^-b with b = {signed(law.exponent)[1:]} "
        f"({CONFIDENCE:.0%} interval), least squares of the logarithms over all runs, no irreducible term."
    )


def notes(groups: list[Group]) -> list[str]:
    """How much was trained, on what."""
    rows = [row for group in groups for row in group.rows]
    seeds = sorted({row["seed"] for row in rows})
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    tokens = sorted({row["tokens"] for row in rows})
    amount = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    return [
        f"{len(rows)} runs, seeds {', '.join(map(str, seeds))}; {amount} tokens per run "
        f"({max(row['epochs'] for row in rows):.2f} times the training text at most), "
        f"{sum(row['seconds'] for row in rows) / 60:,.0f} minutes of training on {rows[0]['device']}; {versions}."
    ]
