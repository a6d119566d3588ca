"""Draw the pictures of `docs/from-figure-to-code.md` into docs/pictures/, as SVG.

What a picture shows of the core is computed by the core: sinusoids, masks, buckets. The output is the same bytes on
every run, and `tests/test_docs.py` draws again and compares.

Usage: python scripts/draw_pictures.py [--output FOLDER]
"""

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from xml.sax.saxutils import escape  # nosec B406 # writes XML, reads none

import torch

import blockformer
from blockformer.compat import causal_masks, create_bidirectional_mask, encoder_masks
from blockformer.positions import RelativeBias, SinusoidalPositions

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"

SANS = "Verdana, 'DejaVu Sans', Helvetica, Arial, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
INK, GREY, LIGHT = "#24292f", "#57606a", "#d0d7de"
PINK, ORANGE, BLUE, YELLOW, PURPLE, GREEN = "#fbdfe3", "#fde3c0", "#d3e9f8", "#f7f3c0", "#e3dcf6", "#d6efd4"
STRONG_BLUE, STRONG_ORANGE, HIDDEN = "#2f6fad", "#e07b16", "#eceff2"
TIMES = "\N{MULTIPLICATION SIGN}"

Point = tuple[float, float]


def number(value: float) -> str:
    """At most one decimal, and no trailing zero: short, and the same on every machine."""
    return f"{value:.1f}".removesuffix(".0").replace("-0", "0" if abs(value) < 0.05 else "-0")


class Canvas:
    """An SVG of a fixed size on a white card, so that it reads on light and on dark pages.

    Args:
        width, height: pixels.
        title: what a screen reader says.
    """

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{SANS}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        ]

    def finish(self) -> str:
        """The whole file."""
        return "\n".join([*self.parts, "</svg>\n"])

    def rect(self, x, y, width, height, fill, stroke=INK, rx=6.0, stroke_width=1.2, dashed=False):
        line = f' stroke="{stroke}" stroke-width="{number(stroke_width)}"' if stroke else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
            f'rx="{number(rx)}" fill="{fill}"{line}{dash}/>'
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
        """A box of the figure: what the paper calls it and, below, what the code calls it."""
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
        self.circle(x, y, 11, "#ffffff")
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


def blend(first: str, second: str, share: float) -> str:
    """A color between two: `share` 0 is the first, 1 the second."""
    pairs = ((int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def diverging(value: float, levels: int = 8) -> str:
    """-1 blue, 0 white, 1 orange, in `levels` steps a side."""
    step = round(abs(value) * levels) / levels
    return blend("#ffffff", STRONG_ORANGE if value > 0 else STRONG_BLUE, min(step, 1.0))


def transformer() -> str:
    """The figure of the paper, each box with its place in the code."""
    canvas = Canvas(1000, 850, "The Transformer: encoder and decoder, each box with its place in Blockformer")
    width = 270
    left, right = 100, 600  # the columns' left edges
    mid_left, mid_right = left + width / 2, right + width / 2
    attention, cross, mlp, norm = 54, 54, 54, 42

    canvas.text(mid_left, 334, "Encoder", 17, bold=True)
    canvas.text(mid_left, 355, "Stack(is_causal=False)", 12, mono=True, fill=GREY)
    canvas.text(mid_right, 24, "Decoder", 17, bold=True)
    canvas.text(mid_right, 45, "Stack(is_causal=True, has_cross_attention=True)", 12, mono=True, fill=GREY)

    canvas.rect(left - 45, 412, width + 70, 282, "#f6f8fa", GREY, rx=12)
    canvas.rect(right - 25, 268, width + 70, 426, "#f6f8fa", GREY, rx=12)
    for x, y, words in ((left - 72, 545, f"N {TIMES}"), (right + width + 74, 478, f"{TIMES} N")):
        canvas.text(x, y, words, 17, bold=True)
        canvas.text(x, y + 22, "Layer", 12, mono=True, fill=GREY)

    def column(middle, x, side, boxes, entrance):
        """Sub-layers from bottom to top, each with the residual line around it."""
        y = entrance
        for name, code, fill, height, norm_code in boxes:
            top = y - 26 - height
            canvas.arrow((middle, y), (middle, top + height))
            canvas.box(x, top, width, height, fill, name, code)
            canvas.arrow((middle, top), (middle, top - 16))
            norm_top = top - 16 - norm
            canvas.box(x, norm_top, width, norm, YELLOW, "Add & Norm", norm_code, 13)
            edge = x if side < 0 else x + width
            out, into = edge + 24 * side, norm_top + norm / 2
            canvas.arrow((middle, y - 13), (out, y - 13), (out, into), (edge, into))
            y = norm_top
        return y

    top_left = column(
        mid_left,
        left,
        -1,
        [
            ("Multi-head attention", "attention.py · Attention", ORANGE, attention, "Layer.self_attn_post_norm"),
            ("Feed forward", "feed_forward.py · FeedForward", BLUE, mlp, "Layer.mlp_post_norm"),
        ],
        700,
    )
    top_right = column(
        mid_right,
        right,
        1,
        [
            ("Masked multi-head attention", "Layer.self_attn", ORANGE, attention, "Layer.self_attn_post_norm"),
            ("Multi-head attention", "Layer.cross_attn", ORANGE, cross, "Layer.cross_attn_post_norm"),
            ("Feed forward", "Layer.mlp", BLUE, mlp, "Layer.mlp_post_norm"),
        ],
        700,
    )
    cross_top = 700 - 26 - attention - 16 - norm - 26 - cross
    turn = top_left - 38
    canvas.line([(mid_left, top_left), (mid_left, turn)])
    canvas.line([(mid_left, turn), (485, turn), (485, cross_top + 18)])
    canvas.arrow((485, cross_top + 18), (right, cross_top + 18))
    canvas.line([(485, cross_top + 18), (485, cross_top + 36)])
    canvas.arrow((485, cross_top + 36), (right, cross_top + 36))
    canvas.text(540, cross_top + 8, "K", 12, bold=True)
    canvas.text(540, cross_top + 48, "V", 12, bold=True)
    canvas.text(mid_right + 12, cross_top + cross + 9, "Q", 12, "start", bold=True)
    canvas.text(mid_left + 12, turn - 12, "encoder_hidden_states [B, S, C]", 11.5, "start", mono=True, fill=GREY)

    for x, middle, name, code in (
        (left, mid_left, "Input embedding", "Stack.embed_tokens"),
        (right, mid_right, "Output embedding", "Stack.embed_tokens"),
    ):
        canvas.box(x, 758, width, 48, PINK, name, code)
        canvas.arrow((middle, 758), (middle, 736))
        canvas.plus(middle, 725)
        canvas.line([(middle, 714), (middle, 700)])
        canvas.arrow((middle, 826), (middle, 806))
    canvas.box(395, 704, 180, 48, "#ffffff", "Positional encoding", "SinusoidalPositions", 13)
    canvas.arrow((395, 725), (mid_left + 11, 725))
    canvas.arrow((575, 725), (mid_right - 11, 725))
    canvas.text(mid_left, 836, "source tokens [B, S]", 13)
    canvas.text(mid_right, 836, "target tokens, shifted right [B, T]", 13)

    canvas.arrow((mid_right, top_right), (mid_right, 226))
    canvas.box(right, 178, width, 48, PURPLE, "Linear", "LanguageModelHead.lm_head")
    canvas.arrow((mid_right, 178), (mid_right, 156))
    canvas.box(right, 108, width, 48, GREEN, "Softmax", "token_cross_entropy · generate()")
    canvas.arrow((mid_right, 108), (mid_right, 84))
    canvas.text(mid_right, 72, "probabilities of the next token [B, T, V]", 13)

    canvas.text(30, 40, "Boxes as in the paper;", 13, "start", fill=GREY)
    canvas.text(30, 60, "names as in src/blockformer.", 13, "start", fill=GREY)
    canvas.text(30, 100, "Drawn with the norm after the sum,", 13, "start", fill=GREY)
    canvas.text(30, 120, 'norm_placement="post".', 12, "start", mono=True, fill=GREY)
    canvas.text(30, 160, "BERT is the left half alone,", 13, "start", fill=GREY)
    canvas.text(30, 180, "GPT-2 and Qwen3 the right half", 13, "start", fill=GREY)
    canvas.text(30, 200, "without the middle attention.", 13, "start", fill=GREY)
    return canvas.finish()


def add_and_norm() -> str:
    """One encoder layer with the norm after and before the sum."""
    canvas = Canvas(920, 570, "Add and norm: post order and pre order beside each other")
    for x, name, formula, note in (
        (70, "post", "norm(x + f(x))", "the orange line meets a norm after every sum"),
        (530, "pre", "x + f(norm(x))", "the orange line meets no norm inside the layers"),
    ):
        middle, width = x + 140, 280
        canvas.text(middle, 28, f'norm_placement="{name}"', 15, bold=True, mono=True)
        canvas.text(middle, 52, formula, 15, mono=True, fill=GREY)
        canvas.rect(x - 20, 124, width + 75, 372, "#f6f8fa", GREY, rx=12)
        canvas.text(x - 8, 482, "Layer", 12, "start", mono=True, fill=GREY)
        canvas.text(middle, 522, "x [B, T, C]", 13)
        canvas.text(middle, 550, note, 12.5, fill=STRONG_ORANGE)
        y = 484.0
        canvas.line([(middle, 510), (middle, y)])
        for sublayer, code, norm_code, fill in (
            ("Attention", "self_attn", "self_attn_pre_norm", ORANGE),
            ("Feed forward", "mlp", "mlp_pre_norm", BLUE),
        ):
            canvas.line([(middle, y), (middle, y - 16)])
            boxes = {"norm": ("norm", norm_code, YELLOW), "f": (sublayer, code, fill)}
            bend, level, out = y - 8, y - 16, x + width + 24
            for kind in ("norm", "f", "+") if name == "pre" else ("f", "+", "norm"):
                canvas.arrow((middle, level), (middle, level - 14))
                if kind == "+":
                    level -= 25
                    canvas.plus(middle, level)
                    canvas.line([(middle, bend), (out, bend)], STRONG_ORANGE, 2)
                    canvas.arrow((out, bend), (out, level), (middle + 12, level), color=STRONG_ORANGE, width=2)
                    level -= 11
                else:
                    title, below, color = boxes[kind]
                    canvas.box(x, level - 60, width, 46, color, title, below)
                    level -= 60
            y = level
        canvas.arrow((middle, y), (middle, 112))
        if name == "pre":
            canvas.box(x, 72, width, 40, "#fffbdd", "final norm, after the last layer", "Stack.norm", 12)
        else:
            canvas.text(middle, 98, "the layer ends in a norm by itself", 12, fill=GREY)
    return canvas.finish()


def _axis(canvas, x, y, width, steps, label):
    """A horizontal axis with (place, text) ticks."""
    canvas.line([(x, y), (x + width, y)], GREY, 1)
    for place, text in steps:
        canvas.line([(place, y), (place, y + 5)], GREY, 1)
        canvas.text(place, y + 14, text, 11, fill=GREY)
    canvas.text(x + width / 2, y + 34, label, 12, fill=GREY)


def _sinusoids(width: int, length: int) -> torch.Tensor:
    config = blockformer.preset("transformer-base", hidden_size=width)
    return SinusoidalPositions(config)(torch.arange(length)[None])[0]  # [T, C]


def sinusoids() -> str:
    """The vectors of 128 positions as a heat map, and the product of two of them against their distance."""
    canvas = Canvas(900, 680, "Sinusoidal positions: a heat map of 128 positions, and their inner product by distance")
    table, size = _sinusoids(64, 128), 6
    x, y = 90, 60
    canvas.text(
        x + 64 * size, 28, "SinusoidalPositions, hidden_size = 64: what is added at each position", 14, bold=True
    )
    canvas.cells(x, y, size, [[diverging(value) for value in row] for row in table.T.tolist()])
    canvas.rect(x, y, 128 * size, 64 * size, "none", GREY, rx=0, stroke_width=1)
    for entry in (0, 16, 32, 48, 63):
        canvas.text(x - 8, y + (entry + 0.5) * size, str(entry), 11, "end", fill=GREY)
    canvas.parts.append(f'<g transform="translate(32 {y + 32 * size}) rotate(-90)">')
    canvas.text(0, 0, "entry of the vector", 12, fill=GREY)
    canvas.parts.append("</g>")
    _axis(canvas, x, y + 64 * size, 128 * size, [(x + (p + 0.5) * size, str(p)) for p in range(0, 128, 16)], "position")
    for step in range(17):
        canvas.rect(868, y + 150 - step * 9, 12, 9, diverging(step / 8 - 1), None, rx=0)
    canvas.rect(868, y + 6, 12, 153, "none", GREY, rx=0, stroke_width=1)
    canvas.text(874, y - 6, "1", 11, fill=GREY)
    canvas.text(874, y + 168, "-1", 11, fill=GREY)

    top, height = 520.0, 100.0
    canvas.text(x + 64 * size, top - 14, "PE(m) · PE(n), as a share of PE(m) · PE(m), hidden_size = 512", 14, bold=True)
    vectors = _sinusoids(512, 128)
    products = (vectors @ vectors[0] / (vectors[0] @ vectors[0])).tolist()
    for value in (0, 0.5, 1):
        canvas.line([(x, top + height * (1 - value)), (x + 128 * size, top + height * (1 - value))], LIGHT, 1)
        canvas.text(x - 8, top + height * (1 - value), str(value), 11, "end", fill=GREY)
    points = [(x + (i + 0.5) * size, top + height * (1 - value)) for i, value in enumerate(products)]
    canvas.line(points, STRONG_BLUE, 2)
    ticks = [(x + (p + 0.5) * size, str(p)) for p in range(0, 128, 16)]
    _axis(canvas, x, top + height, 128 * size, ticks, "distance |m - n|, whatever m is")
    return canvas.finish()


def rotations() -> str:
    """Pairs of entries as hands of clocks: three steps further is the same turn wherever one starts."""
    canvas = Canvas(900, 300, "Each pair of entries turns at a speed of its own")
    vectors = _sinusoids(64, 16)
    for index, pair in enumerate((0, 4, 8, 12)):
        x, y, radius = 120 + 220 * index, 150, 78
        theta = 10000 ** (-2 * pair / 64)
        canvas.text(x, 26, f"entries {2 * pair} and {2 * pair + 1}", 13, bold=True)
        canvas.text(x, 46, f"θ = {theta:.3g}", 12, fill=GREY)
        canvas.circle(x, y, radius, "#ffffff", LIGHT)
        places = [(x + radius * cos, y - radius * sin) for sin, cos in vectors[:, 2 * pair : 2 * pair + 2].tolist()]
        for start, color in ((0, STRONG_BLUE), (4, STRONG_ORANGE)):
            canvas.line([places[start], (x, y), places[start + 3]], color, 2)
            inner = 26 if start == 0 else 38
            angles = [theta * (start + 3 * step / 12) for step in range(13)]
            arc = [(x + inner * math.cos(angle), y - inner * math.sin(angle)) for angle in angles]
            canvas.line(arc, color, 2)
        for position in range(8):
            px, py = places[position]
            canvas.circle(
                px,
                py,
                4,
                {0: STRONG_BLUE, 3: STRONG_BLUE, 4: STRONG_ORANGE, 7: STRONG_ORANGE}.get(position, GREY),
                None,
            )
        last = None
        for position in range(8):
            px, py = x + (places[position][0] - x) * 1.2, y + (places[position][1] - y) * 1.2
            if last is None or math.hypot(px - last[0], py - last[1]) > 13:
                canvas.text(px, py, str(position), 11)
                last = (px, py)
    canvas.text(
        450, 280, "blue: from position 0 to 3; orange: from 4 to 7. In each clock both turn by the same angle.", 13
    )
    return canvas.finish()


def masks() -> str:
    """The three masks of an encoder-decoder, by the functions that the stack calls."""
    canvas = Canvas(960, 400, "Padding mask, causal mask and the mask of cross-attention")
    source, target = ["I", "like", "tea", "pad", "pad"], ["<s>", "ich", "mag", "Tee", "pad"]
    config = blockformer.preset("transformer-base", hidden_size=16, num_attention_heads=2)
    config._attn_implementation = "eager"
    config.layer_types = config.layer_types[:1]
    source_states, target_states = torch.zeros(1, len(source), 16), torch.zeros(1, len(target), 16)
    source_mask = torch.tensor([[int(token != "pad") for token in source]])
    target_mask = torch.tensor([[int(token != "pad") for token in target]])
    positions = torch.arange(len(target))[None]
    causal = causal_masks(config.get_text_config(decoder=True), target_states, target_mask, None, positions)[
        "full_attention"
    ]
    panels = [
        (
            "encoder: padding",
            "compat.encoder_masks",
            source,
            source,
            encoder_masks(config, source_states, source_mask)["full_attention"],
        ),
        ("decoder: causal and padding", "compat.causal_masks", target, target, causal),
        (
            "cross-attention: padding only",
            "stack.Stack._encoder_mask",
            target,
            source,
            create_bidirectional_mask(
                config=config,
                inputs_embeds=target_states,
                attention_mask=source_mask,
                encoder_hidden_states=source_states,
            ),
        ),
    ]
    for index, (name, code, queries, keys, mask) in enumerate(panels):
        x, y, cell = 85 + index * 315, 108, 40
        middle = x + len(keys) * cell / 2
        canvas.text(middle, 28, name, 14, bold=True)
        canvas.text(middle, 50, code, 12, mono=True, fill=GREY)
        visible = (mask[0, 0] == 0).tolist()
        for column, key in enumerate(keys):
            canvas.text(x + (column + 0.5) * cell, y - 14, key, 12, fill=GREY if key == "pad" else INK)
        for row, query in enumerate(queries):
            canvas.text(x - 8, y + (row + 0.5) * cell, query, 12, "end", fill=GREY if query == "pad" else INK)
            for column in range(len(keys)):
                sees = visible[row][column]
                fill = STRONG_BLUE if sees else HIDDEN
                canvas.rect(x + column * cell + 1.5, y + row * cell + 1.5, cell - 3, cell - 3, fill, None, rx=4)
                words, color = ("1", "#ffffff") if sees else ("0", "#8b949e")
                canvas.text(x + (column + 0.5) * cell, y + (row + 0.5) * cell, words, 13, fill=color)
    canvas.text(480, 340, "A row is a query (who looks), a column a key (what is looked at).", 13)
    canvas.text(
        480, 364, "1 is visible: the score stays. 0 is hidden: the score becomes the lowest number, its weight 0.", 13
    )
    return canvas.finish()


def grouped_heads() -> str:
    """Eight query heads that share eight, two and one key/value heads."""
    canvas = Canvas(960, 300, "Grouped heads: how many query heads share a key/value head")
    for index, (kinds, name) in enumerate(((8, "multi-head"), (2, "grouped-query"), (1, "multi-query"))):
        x, step, size = 40 + index * 305, 34, 27
        middle = x + 4 * step
        canvas.text(middle, 28, f"{name}: H = 8, K = {kinds}", 14, bold=True)
        canvas.text(middle, 50, f"num_key_value_heads={kinds}", 12, mono=True, fill=GREY)
        for head in range(8):
            group = head * kinds // 8
            color = blend("#ffffff", STRONG_ORANGE, 0.45) if group % 2 == 0 else blend("#ffffff", STRONG_ORANGE, 0.8)
            center = x + (head + 0.5) * step
            kv_center = x + (group + 0.5) * 8 * step / kinds
            canvas.line([(center, 100 + size), (kv_center, 190)], GREY, 1.2)
            canvas.rect(center - size / 2, 100, size, size, color, None, rx=5)
            canvas.text(center, 100 + size / 2, f"q{head + 1}", 11)
        for group in range(kinds):
            color = blend("#ffffff", STRONG_BLUE, 0.35) if group % 2 == 0 else blend("#ffffff", STRONG_BLUE, 0.6)
            center = x + (group + 0.5) * 8 * step / kinds
            wide = size if kinds == 8 else 64
            canvas.rect(center - wide / 2, 190, wide, size, color, None, rx=5)
            canvas.text(center, 190 + size / 2, "kv" if kinds == 8 else f"k{group + 1}, v{group + 1}", 11)
        canvas.text(middle, 246, f"cache: {2 * kinds} {TIMES} D numbers", 12.5)
        canvas.text(middle, 266, "per token and layer", 12.5)
    canvas.text(28, 84, "queries", 11, "start", fill=GREY)
    return canvas.finish()


def cache() -> str:
    """The same triangle of scores: at once in training, a row at a time in use."""
    canvas = Canvas(960, 450, "Training reads all positions at once, inference one token a step with a cache")
    read, write = ["<s>", "ich", "mag", "grünen", "Tee"], ["ich", "mag", "grünen", "Tee", "</s>"]
    cell, y = 46, 128
    for x, title, below in (
        (95, "training: all positions at once", "one forward pass, labels known"),
        (590, "inference: one token a step", "keys and values of earlier tokens are kept"),
    ):
        canvas.text(x + 2.5 * cell + 25, 28, title, 15, bold=True)
        canvas.text(x + 2.5 * cell + 25, 50, below, 12, fill=GREY)
        canvas.text(x + 2.5 * cell, y - 44, "keys and values of", 11.5, fill=GREY)
        canvas.text(x - 8, y - 18, "reads", 11.5, "end", fill=GREY)
        canvas.text(x + 5 * cell + 30, y - 18, "label" if x < 400 else "writes", 11.5, "start", fill=GREY)
        for column, token in enumerate(read):
            canvas.text(x + (column + 0.5) * cell, y - 18, token, 11.5)
        for row in range(5):
            middle = y + (row + 0.5) * cell
            canvas.text(x - 8, middle, read[row], 12, "end")
            for column in range(5):
                if column > row:
                    fill = HIDDEN if x < 400 else "#ffffff"
                elif x < 400 or column == row:
                    fill = STRONG_ORANGE
                else:
                    fill = blend("#ffffff", STRONG_BLUE, 0.45)
                if fill != "#ffffff":
                    canvas.rect(x + column * cell + 2, y + row * cell + 2, cell - 4, cell - 4, fill, None, rx=4)
            canvas.arrow((x + 5 * cell + 4, middle), (x + 5 * cell + 24, middle))
            canvas.text(x + 5 * cell + 30, middle, write[row], 12, "start")
            if x > 400:
                canvas.text(x - 62, middle, f"step {row + 1}", 12, "end", fill=GREY)
    for x, fill, words in (
        (60, STRONG_ORANGE, "key and value of this pass"),
        (340, blend("#ffffff", STRONG_BLUE, 0.45), "key and value from the cache (GrowingLayer)"),
        (730, HIDDEN, "hidden by the causal mask"),
    ):
        canvas.rect(x, 388, 18, 18, fill, None, rx=3)
        canvas.text(x + 26, 397, words, 12, "start")
    canvas.text(480, 430, "Both give the same logits: what a token looks at is the same in both.", 13)
    return canvas.finish()


def relative_buckets() -> str:
    """The buckets of a relative bias, by its own function, both ways and looking back only."""
    canvas = Canvas(960, 690, "The buckets of a relative position bias")
    config = blockformer.preset("t5")
    biases = [RelativeBias(config, bidirectional=both) for both in (True, False)]
    size, cell = 16, 24
    for x, bias, name in zip((70, 520), biases, ("encoder: both ways", "decoder: looking back"), strict=True):
        places = torch.arange(size)
        buckets = bias.bucket(places[None, :] - places[:, None]).tolist()
        half = 16 if bias.bidirectional else 32

        def color(bucket, half=half):
            return blend(
                "#ffffff", STRONG_BLUE if bucket < half else STRONG_ORANGE, 0.12 + 0.8 * (bucket % half) / half
            )

        def is_visible(row, column, bias=bias):
            return bias.bidirectional or column <= row

        canvas.text(x + size * cell / 2, 28, name, 14, bold=True)
        canvas.text(x + size * cell / 2, 56, "key j", 11.5, fill=GREY)
        canvas.parts.append(f'<g transform="translate({x - 14} {70 + size * cell // 2}) rotate(-90)">')
        canvas.text(0, 0, "query i", 11.5, fill=GREY)
        canvas.parts.append("</g>")
        rows = [
            [color(bucket) if is_visible(row, column) else HIDDEN for column, bucket in enumerate(line)]
            for row, line in enumerate(buckets)
        ]
        canvas.cells(x, 70, cell, rows)
        canvas.parts.append(f'<g font-size="10.5" text-anchor="middle" fill="{INK}">')
        canvas.parts += [
            f'<text x="{x + column * cell + cell // 2}" y="{70 + row * cell + cell // 2 + 4}">{bucket}</text>'
            for row, line in enumerate(buckets)
            for column, bucket in enumerate(line)
            if is_visible(row, column)
        ]
        canvas.parts.append("</g>")
    x, y, wide, high = 90, 508, 780, 130
    canvas.text(480, 486, "bucket by distance |j - i|: one each at first, then wider and wider", 14, bold=True)
    for bucket in (0, 8, 16, 24, 31):
        canvas.line([(x, y + high * (1 - bucket / 31)), (x + wide, y + high * (1 - bucket / 31))], LIGHT, 1)
        canvas.text(x - 8, y + high * (1 - bucket / 31), str(bucket), 11, "end", fill=GREY)
    distances = torch.arange(161)
    for bias, color, label in zip(biases, (STRONG_ORANGE, STRONG_BLUE), ("encoder, one side", "decoder"), strict=True):
        steps = bias.bucket(-distances).tolist()
        points = []
        for distance, bucket in enumerate(steps[:-1]):
            level = y + high * (1 - bucket / 31)
            points += [(x + wide * distance / 160, level), (x + wide * (distance + 1) / 160, level)]
        canvas.line(points, color, 2)
        canvas.text(x + wide - 6, points[-1][1] + 14, label, 12, "end", fill=color)
    ticks = [(x + wide * (d + 0.5) / 160, str(d)) for d in (0, 8, 16, 32, 64, 96, 128)]
    _axis(canvas, x, y + high, wide, ticks, "distance in tokens (32 buckets, relative_attention_max_distance=128)")
    return canvas.finish()


PICTURES: dict[str, Callable[[], str]] = {
    "transformer": transformer,
    "add-and-norm": add_and_norm,
    "sinusoids": sinusoids,
    "rotations": rotations,
    "masks": masks,
    "grouped-heads": grouped_heads,
    "cache": cache,
    "relative-buckets": relative_buckets,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8", newline="\n")
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
