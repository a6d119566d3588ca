"""The plots of a report, as SVG: differences to the base, loss by FLOPs, and the power law.

They are drawn on the canvas of the other pictures, whose fonts and colours they share. Matplotlib, which the demo uses,
would be a dependency of the lab for lines and dots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..pictures.canvas import (
    GREY,
    INK,
    LEAF,
    LIGHT,
    QUERY,
    STRONG_BLUE,
    STRONG_ORANGE,
    TIMES,
    Canvas,
    short,
    words_width,
)
from .intervals import CONFIDENCE, PowerLaw
from .table import Group, Row, signed

COLORS = (STRONG_BLUE, STRONG_ORANGE, LEAF, QUERY)
Point = tuple[float, float]


def bits_of(row: Row, nats: float) -> float:
    """A loss in nats per token of the held-out text, as bits per byte."""
    return nats / math.log(2) * row["held_out_tokens"] / row["held_out_bytes"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def curve(rows: list[Row], of_all: Callable[[Sequence[float]], float] = _mean) -> list[Point]:
    """(FLOPs, bits per byte) of the held-out text on the way, of the rows that did not diverge.

    Args:
        of_all: what to take of the bits of all rows at a point: their mean, or `min` or `max`.
    """
    rows, points = [row for row in rows if row["bits_per_byte"] is not None], []
    for pairs in zip(*(row["curve"]["held_out"] for row in rows), strict=False):
        flops = [tokens * row["flops_per_token"] for (tokens, _), row in zip(pairs, rows, strict=True)]
        bits = [bits_of(row, loss) for (_, loss), row in zip(pairs, rows, strict=True)]
        points.append((_mean(flops), of_all(bits)))
    return points


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two, at most so many."""
    if high <= low:
        return [low]
    power = 10 ** math.floor(math.log10((high - low) / most))
    step = next(power * part for part in (1, 2, 5, 10) if (high - low) / (power * part) <= most)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True)
class Frame:
    """A rectangle of a canvas and what its sides stand for; `is_log` of both axes."""

    canvas: Canvas
    x: float
    y: float
    width: float
    height: float
    across: tuple[float, float]
    up: tuple[float, float]
    is_log: bool = False

    def at(self, point: Point) -> Point:
        """A point's place in pixels."""
        shares = []
        for value, (low, high) in zip(point, (self.across, self.up), strict=True):
            value, low, high = (math.log(each) if self.is_log else each for each in (value, low, high))
            shares.append((value - low) / ((high - low) or 1.0))
        return self.x + shares[0] * self.width, self.y + (1 - shares[1]) * self.height

    def draw(self, across: Sequence[float], up: Sequence[float], across_name: str = "", up_name: str = "") -> None:
        """Lines at the values, with their numbers and the names of the axes."""
        for value in across:
            x, _ = self.at((value, self.up[0]))
            self.canvas.line([(x, self.y), (x, self.y + self.height)], LIGHT, 1)
            self.canvas.text(x, self.y + self.height + 12, short(value), 11, fill=GREY)
        for value in up:
            _, y = self.at((self.across[0], value))
            self.canvas.line([(self.x, y), (self.x + self.width, y)], LIGHT, 1)
            self.canvas.text(self.x - 6, y, f"{value:.4g}", 11, "end", fill=GREY)
        if across_name:
            self.canvas.text(self.x + self.width / 2, self.y + self.height + 30, across_name, 12, fill=GREY)
        if up_name:
            self.canvas.text(self.x, self.y - 12, up_name, 12, "start", fill=GREY)

    def curve(self, points: Sequence[Point], color: str, width: float = 1.8, dashed: bool = False) -> None:
        """A line through points."""
        self.canvas.line([self.at(point) for point in points], color, width, dashed)

    def band(self, lower: Sequence[Point], upper: Sequence[Point], color: str) -> None:
        """The area between two lines, pale."""
        self.canvas.band(map(self.at, lower), map(self.at, upper), color)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    spare = 0.06 * ((high - low) or abs(low)) or 1.0
    return low - spare, high + spare


def draw_differences(groups: list[Group]) -> str | None:
    """How far each config is from the base, with its interval; None if there is nothing to compare."""
    shown = [(group.name, group.beside_base) for group in groups if group.beside_base is not None]
    if not shown:
        return None
    left = 24 + max(words_width(name, 12) for name, _ in shown)
    canvas = Canvas(math.ceil(left + 560), 84 + 26 * len(shown), "Bits per byte of each config minus the base's")
    ends = [0.0]
    for _, (estimate, margin) in shown:
        ends += [estimate - (margin or 0), estimate + (margin or 0)]
    frame = Frame(canvas, left, 34, 390, 26 * len(shown), _range(ends), (0, len(shown)))
    words = f"bits per byte minus the base's, with {CONFIDENCE:.0%} interval; left is better"
    frame.draw(ticks(*frame.across), (), words)
    frame.curve([(0, 0), (0, len(shown))], INK, 1.4)
    for index, (name, interval) in enumerate(shown):
        estimate, margin = interval
        color = GREY if not interval.is_clear else STRONG_BLUE if estimate < 0 else STRONG_ORANGE
        level = len(shown) - index - 0.5
        x, y = frame.at((estimate, level))
        if margin:
            frame.curve([(estimate - margin, level), (estimate + margin, level)], color, 2.4)
        canvas.circle(x, y, 5, color, None)
        canvas.text(left - 10, y, name, 12, "end")
        canvas.text(left + 400, y, signed(interval), 11, "start", mono=True, fill=GREY)
    return canvas.finish()


def draw_curves(groups: list[Group]) -> str | None:
    """A panel for each axis: bits per byte held out by training FLOPs, the base in black; None without curves.

    A line is the mean over seeds, the pale band around it reaches from the best to the worst seed.
    """
    base = next((group for group in groups if group.is_base), None)
    panels: dict[str, list[Group]] = {}
    for group in groups:
        if not group.is_base and len(curve(group.rows)) > 1:
            is_axis = "=" in group.first["variant"]
            panels.setdefault(group.first["axis"] if is_axis else "other configs", []).append(group)
    if list(panels) == ["other configs"]:
        panels = {"": panels.pop("other configs")}  # a title says nothing of the only panel
    of_base = curve(base.rows) if base else []
    if not panels:
        panels = {"": []} if len(of_base) > 1 else {}
    if not panels:
        return None
    points = [point for group in groups for most in (min, max) for point in curve(group.rows, most)]
    across, up = _range([x for x, _ in points]), _range([y for _, y in points])
    columns = min(3, len(panels))
    deepest = 1 + max(len(found) for found in panels.values())
    height = 168 + 18 * deepest + 84
    canvas = Canvas(columns * 330 + 20, math.ceil(len(panels) / columns) * height + 16, "Loss by FLOPs")
    for index, (axis, found) in enumerate(panels.items()):
        x, y = 62 + index % columns * 330, 44 + index // columns * height
        frame = Frame(canvas, x, y, 250, 168, across, up)
        frame.draw(ticks(*across, most=4), ticks(*up, most=4), "bits per byte by training FLOPs")
        canvas.text(x, y - 16, axis, 13, "start", bold=True)
        lines = [("base", base.rows if base else [], INK)]
        for color, group in zip(COLORS * len(found), found, strict=False):
            name = group.name.partition("=")[2] if "=" in group.first["variant"] else group.name
            lines.append((name, group.rows, color))
        for place, (name, rows, color) in enumerate(lines):
            is_dashed = place > len(COLORS)  # its color is another line's
            if len(curve(rows)) > 1:
                frame.band(curve(rows, min), curve(rows, max), color)
                frame.curve(curve(rows), color, dashed=is_dashed)
            level = y + 168 + 52 + 18 * place
            canvas.line([(x, level), (x + 22, level)], color, 3, is_dashed)
            canvas.text(x + 30, level, name, 12, "start")
    return canvas.finish()


def draw_runs(group: Group) -> str | None:
    """Each run of a config: its training loss, dashed, and its loss on the held-out text; None without points."""
    series = [(row["seed"], kind, row["curve"][kind]) for row in group.rows for kind in ("train", "held_out")]
    points = [(tokens, loss) for _, _, found in series for tokens, loss in found]
    if len({x for x, _ in points}) < 2:
        return None
    canvas = Canvas(660, 250 + 18 * len(group.rows), f"Losses of {group.name}")
    frame = Frame(canvas, 62, 34, 570, 160, _range([x for x, _ in points]), _range([y for _, y in points]))
    frame.draw(ticks(*frame.across), ticks(*frame.up, most=4), "tokens", "nats per token; dashed: training")
    for seed, kind, found in series:
        color = COLORS[[row["seed"] for row in group.rows].index(seed) % len(COLORS)]
        frame.curve([(tokens, loss) for tokens, loss in found], color, 1.6, kind == "train")
    for index, row in enumerate(group.rows):
        level = 248 + 18 * index
        canvas.line([(62, level), (84, level)], COLORS[index % len(COLORS)], 3)
        canvas.text(92, level, f"seed {row['seed']}", 12, "start")
    return canvas.finish()


def draw_scaling(laws: dict[str, tuple[list[Point], PowerLaw]]) -> str:
    """Bits per byte by training FLOPs at each width, both logarithmic, with the fitted power laws."""
    points = [point for found, _ in laws.values() for point in found]
    canvas = Canvas(700, 380 + 20 * len(laws), "The power law of loss and compute")
    (low, high), up = _range([math.log(x) for x, _ in points]), _range([math.log(y) for _, y in points])
    frame = Frame(
        canvas, 70, 40, 600, 270, (math.exp(low), math.exp(high)), (math.exp(up[0]), math.exp(up[1])), is_log=True
    )
    across = sorted({x for x, _ in points})
    kept = [x for index, x in enumerate(across) if not index or x / across[index - 1] > 1.25]
    frame.draw(kept, ticks(*frame.up), "training FLOPs (logarithmic)", "bits per byte (logarithmic)")
    for index, (name, (found, law)) in enumerate(laws.items()):
        color = COLORS[index % len(COLORS)]
        frame.curve([(x, law.at(x)) for x in (math.exp(low), math.exp(high))], color, 1.6, index >= len(COLORS))
        for point in found:
            canvas.circle(*frame.at(point), 4, color, None)
        level = 370 + 20 * index
        canvas.line([(70, level), (92, level)], color, 3)
        canvas.text(100, level, f"{name}: {law.factor:.3g} {TIMES} FLOPs^-{signed(law.exponent)[1:]}", 12, "start")
    return canvas.finish()
