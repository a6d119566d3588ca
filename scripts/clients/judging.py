"""Holds the results of a run to the accepted differences."""

from collections.abc import Iterable
from dataclasses import dataclass

from accepted import ACCEPTED, WORKS, Accepted

TOLERANCE = 1e-4
"""By which results may differ and are the same, as a share of the largest number of a result."""


@dataclass
class Judged:
    """What became of a tool's rows.

    Args:
        reasons: of each row why it differs; "" where it does not, None where nothing accepts it.
        complaints: a line for each row or entry that makes the run fail.
    """

    reasons: list[str | None]
    complaints: list[str]


def differs(row: dict) -> bool:
    """Whether a row is anything but the same on both sides. What transformers skips, ours may do."""
    fine = row["ours"] == WORKS and (row["theirs"] == WORKS or row["theirs"].startswith("skipped"))
    return not (fine and row["difference"] <= TOLERANCE)  # NaN is not a small difference


def judge(tool: str, rows: list[dict], whole: bool, entries: Iterable[Accepted] = ACCEPTED) -> Judged:
    """Compare a tool's rows with what is accepted of it.

    Args:
        rows: with `job`, `model`, what `ours` and `theirs` say, and their `difference`.
        whole: whether the tool's script did all that it does; otherwise entries without a row are left out.
    """
    known = {(entry.job, model): entry for entry in entries if entry.tool == tool for model in entry.models}
    reasons: list[str | None] = []
    complaints = []
    for row in rows:
        entry = known.pop((row["job"], row["model"]), None)
        wrong = _wrong(row, entry)
        reasons.append(None if wrong else entry.reason if entry else "")
        if wrong:
            complaints.append(f"{tool}, {row['job']}, {row['model']}: {wrong}")
    if whole:
        complaints += [f"{tool}, {job}, {model}: accepted, but never run" for job, model in known]
    return Judged(reasons, complaints)


def _wrong(row: dict, entry: Accepted | None) -> str:
    """What is wrong with a row, if anything."""
    if not differs(row):
        return "accepted, but no longer happens: remove the entry" if entry else ""
    found = said(row)
    if entry is None:
        return f"differs and is not accepted: {found}"
    for side, beginning in (("ours", entry.ours), ("theirs", entry.theirs)):
        if not row[side].startswith(beginning) or (beginning == WORKS) != (row[side] == WORKS):
            return f"{side} is accepted with {beginning!r}, not with {row[side]!r}"
    if entry.bound is not None and not row["difference"] <= entry.bound:
        return f"accepted up to {entry.bound:.1e}: {found}"
    return ""


def said(row: dict) -> str:
    """What a row found, in a line."""
    if row["ours"] == row["theirs"] == WORKS:
        return row.get("unequal") or f"difference {row['difference']:.1e}"
    return f"ours: {row['ours']}; theirs: {row['theirs']}"
