"""What comes of an experiment, from its rows alone: table, plots, page."""

from __future__ import annotations

import json
from pathlib import Path

from blockformer.conversion.files.atomic import write_text

from .experiment import LabError, Run
from .intervals import CONFIDENCE, PowerLaw, power_law
from .page import page
from .plots import Point, draw_curves, draw_differences, draw_scaling
from .runs import ROWS, RUNS, read_rows
from .table import EXPLAINED, Group, groups, markdown, signed

TABLE, PAGE = "table.md", "index.html"
# Heading -> file.
PICTURES = {"Beside the base": "differences.svg", "Loss by FLOPs": "curves.svg", "Power law": "scaling.svg"}


def write_report(folder: Path, runs: list[Run], name: str) -> list[Group]:
    """Write it of all rows that are there, whichever process made them.

    Args:
        folder: the experiment's.
        runs: all runs of the experiment, for their order.
        name: the experiment's, for the page.

    Raises:
        LabError: there is no row yet.
    """
    rows = read_rows(folder)
    if not rows:
        raise LabError(f"{folder} has no finished run yet")
    found = groups(rows, list(dict.fromkeys(run.group for run in runs)))
    if (folder / RUNS).is_dir():
        write_text(folder / ROWS, "".join(json.dumps(row) + "\n" for group in found for row in group.rows))
    laws = scaling(found)
    drawn = (draw_differences(found), draw_curves(_of_one_width(found)), draw_scaling(laws) if laws else None)
    pictures = {heading: svg for heading, svg in zip(PICTURES, drawn, strict=True) if svg}
    told = [*notes(found), *(law_in_words(name, law) for name, (_, law) in laws.items())]
    for heading, file in PICTURES.items():
        if heading in pictures:
            write_text(folder / file, pictures[heading])
        else:
            (folder / file).unlink(missing_ok=True)
    write_text(folder / TABLE, markdown(found, told))
    write_text(folder / PAGE, page(name, found, pictures, [EXPLAINED.format(confidence=CONFIDENCE), *told]))
    return found


def _of_one_width(found: list[Group]) -> list[Group]:
    """Those of the width that has most configs: a plot of curves compares at one."""
    widths = [group.first["width"] for group in found]
    most = max(widths, key=widths.count)
    return [group for group in found if group.first["width"] == most]


def scaling(found: list[Group]) -> dict[str, tuple[list[Point], PowerLaw]]:
    """Config -> its points (FLOPs of a run, bits per byte) and the power law, of each that ran at several widths."""
    points: dict[str, list[Point]] = {}
    for group in found:
        for row in group.rows:
            if row["bits_per_byte"] is not None:
                points.setdefault(row["variant"], []).append((row["flops"], row["bits_per_byte"]))
    widths: dict[str, set[int]] = {}
    for group in found:
        widths.setdefault(group.first["variant"], set()).add(group.first["width"])
    ladders = {name: of_one for name, of_one in points.items() if len(widths[name]) > 1}
    return {
        name: (of_one, power_law(*map(list, zip(*of_one, strict=True))))
        for name, of_one in ladders.items()
        if len({flops for flops, _ in of_one}) > 1
    }


def law_in_words(name: str, law: PowerLaw) -> str:
    """The fit of one config."""
    return (
        f"{name}: bits per byte = {law.factor:.4g} * FLOPs^-b with b = {signed(law.exponent)[1:]} "
        f"({CONFIDENCE:.0%} interval), least squares of the logarithms over all runs, no irreducible term."
    )


def notes(found: list[Group]) -> list[str]:
    """How much was trained, on what."""
    rows = [row for group in found for row in group.rows]
    seeds = sorted({row["seed"] for row in rows})
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    tokens = sorted({row["tokens"] for row in rows})
    amount = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    return [
        f"{len(rows)} runs, seeds {', '.join(map(str, seeds))}; {amount} tokens a run "
        f"({max(row['epochs'] for row in rows):.2f} times the training text at most), "
        f"{sum(row['seconds'] for row in rows) / 60:,.0f} minutes of training on {rows[0]['device']}; {versions}."
    ]
