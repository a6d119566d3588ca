"""What comes of an experiment, from its rows alone: table, plots, page."""

from __future__ import annotations

import json
from pathlib import Path

from .experiment import LabError, Run
from .runs import ROWS, RUNS, read_rows
from .table import Group, groups, markdown
from .write import write_text

TABLE = "table.md"


def write_report(folder: Path, runs: list[Run]) -> list[Group]:
    """Write it of all rows that are there, whichever process made them.

    Args:
        folder: the experiment's.
        runs: all runs of the experiment, for their order.

    Raises:
        LabError: there is no row yet.
    """
    rows = read_rows(folder)
    if not rows:
        raise LabError(f"{folder} has no finished run yet")
    found = groups(rows, list(dict.fromkeys(run.group for run in runs)))
    if (folder / RUNS).is_dir():
        write_text(folder / ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    write_text(folder / TABLE, markdown(found, notes(found)))
    return found


def notes(found: list[Group]) -> list[str]:
    """How much was trained, on what."""
    row = found[0].first
    seeds = sorted({row["seed"] for group in found for row in group.rows})
    runs = sum(len(group.rows) for group in found)
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    tokens = sorted({row["tokens"] for group in found for row in group.rows})
    amount = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    return [
        f"{runs} runs, seeds {', '.join(map(str, seeds))}; {amount} tokens a run "
        f"({row['epochs']:.2f} times the training text), on {row['device']}; {versions}."
    ]
