"""What every picture is drawn with: an SVG of boxes, words, lines, arrows and heat maps."""

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape  # nosec B406 # writes XML, reads none

SANS = "Verdana, 'DejaVu Sans', Helvetica, Arial, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
# Name -> color on a light page and on a dark one. A file is drawn in the light ones; a page may put names for them.
PALETTE = {
    "ink": ("#24292f", "#e6edf3"),
    "grey": ("#57606a", "#aab4bf"),
    "light": ("#d0d7de", "#3d444d"),
    "paper": ("#ffffff", "#12161c"),
    "panel": ("#f6f8fa", "#1b2027"),
    "pink": ("#fbdfe3", "#5a2b36"),
    "orange": ("#fde3c0", "#5c3d16"),
    "blue": ("#d3e9f8", "#1c415c"),
    "yellow": ("#f7f3c0", "#4b470f"),
    "purple": ("#e3dcf6", "#413266"),
    "green": ("#d6efd4", "#244c24"),
    "query": ("#f0a95c", "#d98a34"),
    "leaf": ("#5fa35f", "#69b569"),
    "strong-blue": ("#2f6fad", "#6cb0f0"),
    "strong-orange": ("#e07b16", "#f0953a"),
    "hidden": ("#eceff2", "#2a3038"),
}
INK, GREY, LIGHT, PAPER, PANEL = (PALETTE[name][0] for name in ("ink", "grey", "light", "paper", "panel"))
PINK, ORANGE, BLUE = (PALETTE[name][0] for name in ("pink", "orange", "blue"))
YELLOW, PURPLE, GREEN = (PALETTE[name][0] for name in ("yellow", "purple", "green"))
QUERY, LEAF, HIDDEN = (PALETTE[name][0] for name in ("query", "leaf", "hidden"))
STRONG_BLUE, STRONG_ORANGE = (PALETTE[f"strong-{name}"][0] for name in ("blue", "orange"))
TIMES = "\N{MULTIPLICATION SIGN}"
QUOTES = {'"': "&quot;"}

Point = tuple[float, float]


def number(value: float) -> str:
    """At most one decimal, and no trailing zero: short, and the same on every machine."""
    return f"{value:.1f}".removesuffix(".0").replace("-0", "0" if abs(value) < 0.05 else "-0")


def short(value: float) -> str:
    """1234567 -> "1.23 M"."""
    for unit in ("", " k", " M", " G", " T", " P"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.3g} E"


class Canvas:
    """An SVG of a fixed size on a white card, so that it reads on light and on dark pages.

    Args:
        width, height: pixels.
        title: for screen readers.
    """

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{SANS}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def finish(self) -> str:
        """The whole file."""
        return "\n".join([*self.parts, "</svg>\n"])

    def rect(self, x, y, width, height, fill, stroke=INK, rx=6.0, stroke_width=1.2):
        line = f' stroke="{stroke}" stroke-width="{number(stroke_width)}"' if stroke else ""
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
            f'rx="{number(rx)}" fill="{fill}"{line}/>'
        )

    def circle(self, x, y, radius, fill, stroke=INK):
        line = f' stroke="{stroke}" stroke-width="1.2"' if stroke else ""
        self.parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{fill}"{line}/>')

    def text(self, x, y, words, size=13.0, anchor="middle", bold=False, mono=False, fill=INK):
        """One line; `y` is its middle."""
        style = f' font-family="{MONO}"' if mono else ""
        style += ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y + 0.35 * size)}" font-size="{number(size)}" '
            f'text-anchor="{anchor}" fill="{fill}"{style}>{escape(words)}</text>'
        )

    def box(self, x, y, width, height, fill, name, code="", size=14.0):
        """A box of the figure: the paper's name and, below, the code's."""
        self.rect(x, y, width, height, fill)
        middle = x + width / 2
        if not code:
            self.text(middle, y + height / 2, name, size, bold=True)
            return
        self.text(middle, y + height * 0.33, name, size, bold=True)
        self.text(middle, y + height * 0.71, code, 11.5, mono=True, fill=GREY)

    def line(self, points: Iterable[Point], color=INK, width=1.4, dashed=False):
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{number(width)}" '
            f'stroke-linejoin="round"{dash}/>'
        )

    def band(self, lower: Iterable[Point], upper: Iterable[Point], color=INK):
        """The area between two lines, pale."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in [*lower, *reversed(list(upper))])
        self.parts.append(f'<polygon points="{path}" fill="{color}" fill-opacity="0.18"/>')

    def arrow(self, *points: Point, color=INK, width=1.4):
        """A line through the points with a head at the last."""
        (x0, y0), (x, y) = points[-2:]
        length = math.hypot(x - x0, y - y0)
        ux, uy = (x - x0) / length, (y - y0) / length
        base = (x - 8 * ux, y - 8 * uy)
        self.line([*points[:-1], base], color, width)
        corners = [(x, y), (base[0] - 4 * uy, base[1] + 4 * ux), (base[0] + 4 * uy, base[1] - 4 * ux)]
        path = " ".join(f"{number(a)},{number(b)}" for a, b in corners)
        self.parts.append(f'<polygon points="{path}" fill="{color}"/>')

    def plus(self, x, y):
        """The sign of an addition."""
        self.circle(x, y, 11, PAPER)
        self.line([(x - 6, y), (x + 6, y)])
        self.line([(x, y - 6), (x, y + 6)])

    def cells(self, x, y, size, colors: list[list[str]]):
        """A heat map of square cells, one path for each color."""
        runs: dict[str, list[str]] = {}
        for row, names in enumerate(colors):
            start = 0
            for column in range(1, len(names) + 1):
                if column == len(names) or names[column] != names[start]:
                    run = f"M{start} {row}h{column - start}v1h-{column - start}z"
                    runs.setdefault(names[start], []).append(run)
                    start = column
        self.parts.append(
            f'<g transform="translate({number(x)} {number(y)}) scale({number(size)})" shape-rendering="crispEdges">'
        )
        self.parts += [f'<path fill="{color}" d="{"".join(runs[color])}"/>' for color in sorted(runs)]
        self.parts.append("</g>")

    def open_group(self, **attributes: str):
        """Everything drawn until `close_group` belongs together; a page finds it by its attributes."""
        words = "".join(
            f' {name.strip("_").replace("_", "-")}="{escape(text, QUOTES)}"' for name, text in attributes.items()
        )
        self.parts.append(f"<g{words}>")

    def close_group(self):
        self.parts.append("</g>")


def words_width(words: str, size: float) -> float:
    """About how wide a line of text is, in pixels."""
    return 0.61 * size * len(words)


def blend(first: str, second: str, share: float) -> str:
    """A color between two: `share` 0 is the first, 1 the second."""
    pairs = ((int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def diverging(value: float) -> str:
    """-1 blue, 0 white, 1 orange, in eight steps a side."""
    step = round(abs(value) * 8) / 8
    return blend("#ffffff", STRONG_ORANGE if value > 0 else STRONG_BLUE, min(step, 1.0))
