"""Rows put together: each config's mean and spread over its seeds, compared with the base, as a Markdown table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .intervals import CONFIDENCE, Interval, Spread, difference, spread

Row = dict[str, Any]
TITLE = ("config", "parameters", "bits per byte", "difference", "reading", "seconds")
EXPLAINED = (
    "Bits per byte of the held-out text: the mean over the seeds ± the standard deviation of one run (n - 1). "
    "The difference is from the base of the same width, with its {confidence:.0%} interval by Welch's t test over "
    "the seeds. It counts as better or worse only if the interval does not contain 0. Of 20 configs that change "
    "nothing, about one would still seem to change something."
)


@dataclass(frozen=True)
class Group:
    """The runs of one config at one width.

    Attributes:
        rows: one for each seed, including runs that diverged.
        scores: bits per byte of the runs that did not diverge.
        beside_base: how much more bits per byte than the base of this width; None of the base, or without runs of it.
    """

    name: str
    rows: list[Row]
    scores: Spread | None
    beside_base: Interval | None

    @property
    def first(self) -> Row:
        """A row that stands for all in what does not depend on the seed."""
        return self.rows[0]

    @property
    def is_base(self) -> bool:
        return self.first["variant"] == "base"

    @property
    def reading(self) -> str:
        """The difference in a word."""
        if self.scores is None:
            return "diverged"
        if self.is_base:
            return ""
        if self.beside_base is None:
            return "no base to compare with"
        if self.beside_base.margin is None:
            return "one seed shows no spread"
        if not self.beside_base.is_clear:
            return "within the spread"
        return "better" if self.beside_base.estimate < 0 else "worse"


def group_rows(rows: list[Row], order: list[str] | None = None) -> list[Group]:
    """Rows by config and width, in the order of the experiment."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault(row["group"], []).append(row)
    scores = {name: _scores(of_one) for name, of_one in found.items()}
    bases = {of_one[0]["width"]: scores[name] for name, of_one in found.items() if of_one[0]["variant"] == "base"}
    made = []
    for name, of_one in found.items():
        base = bases.get(of_one[0]["width"])
        is_base = of_one[0]["variant"] == "base"
        beside = difference(scores[name], base) if base and scores[name] and not is_base else None
        made.append(Group(name, of_one, spread(scores[name]) if scores[name] else None, beside))
    place = {name: index for index, name in enumerate(order or [])}
    return sorted(made, key=lambda group: (place.get(group.name, len(place)), group.first["width"]))


def _scores(rows: list[Row]) -> list[float]:
    return [row["bits_per_byte"] for row in rows if row["bits_per_byte"] is not None]


def table(groups: list[Group]) -> list[tuple[str, ...]]:
    """The cells, the title first."""
    return [TITLE, *(_cells(group) for group in groups)]


def _cells(group: Group) -> tuple[str, ...]:
    seconds = spread([row["seconds"] for row in group.rows]).mean
    lost = sum(row["bits_per_byte"] is None for row in group.rows)
    reading = group.reading + (f" ({lost} of {len(group.rows)} diverged)" if lost and group.scores else "")
    return (
        group.name,
        f"{group.first['parameters']:,}",
        "-" if group.scores is None else with_spread(group.scores),
        "" if group.beside_base is None else signed(group.beside_base),
        reading,
        f"{seconds:,.0f}",
    )


def with_spread(scores: Spread) -> str:
    """Mean ± deviation."""
    return f"{scores.mean:.4f}" + ("" if scores.deviation is None else f" ± {scores.deviation:.4f}")


def signed(interval: Interval) -> str:
    """An estimate with its sign, and its interval's half."""
    return f"{interval.estimate:+.4f}" + ("" if interval.margin is None else f" ± {interval.margin:.4f}")


def markdown(groups: list[Group], notes: list[str]) -> str:
    """The table, how to read it, and notes on this experiment."""
    title, *lines = table(groups)
    text = [" | ".join(title), "|".join([" --- ", *[" ---: "] * 3, " --- ", " ---: "])]
    text += [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    body = "\n".join(f"| {line} |" if index != 1 else f"|{line}|" for index, line in enumerate(text))
    return "\n\n".join([body, EXPLAINED.format(confidence=CONFIDENCE), *notes]) + "\n"
