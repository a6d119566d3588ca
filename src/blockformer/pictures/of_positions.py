"""Pictures of how a model learns of order: sinusoids, rotations, the buckets of a relative bias."""

import math

import torch

from ..model.relative_bias import RelativeBias
from ..model.sinusoidal import SinusoidalPositions
from ..presets import preset
from .canvas import GREY, HIDDEN, INK, LIGHT, PAPER, STRONG_BLUE, STRONG_ORANGE, Canvas, blend, diverging


def _axis(canvas, x, y, width, steps, label):
    """A horizontal axis with (place, text) ticks."""
    canvas.line([(x, y), (x + width, y)], GREY, 1)
    for place, text in steps:
        canvas.line([(place, y), (place, y + 5)], GREY, 1)
        canvas.text(place, y + 14, text, 11, fill=GREY)
    canvas.text(x + width / 2, y + 34, label, 12, fill=GREY)


def _sinusoids(width: int, length: int) -> torch.Tensor:
    config = preset("transformer-base", hidden_size=width)
    return SinusoidalPositions(config)(torch.arange(length)[None])[0]  # [T, C]


def sinusoids() -> str:
    """The vectors of 128 positions as a heat map, and the dot product of two of them against their distance."""
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
    canvas = Canvas(900, 310, "Each pair of entries turns at its own speed")
    vectors = _sinusoids(64, 16)
    for index, pair in enumerate((0, 2, 4, 6)):
        x, y, radius = 120 + 220 * index, 164, 78
        theta = 10000 ** (-2 * pair / 64)
        canvas.text(x, 26, f"entries {2 * pair} and {2 * pair + 1}", 13, bold=True)
        canvas.text(x, 46, f"θ = {theta:.3g}", 12, fill=GREY)
        canvas.circle(x, y, radius, PAPER, LIGHT)
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
        450, 292, "blue: from position 0 to 3; orange: from 4 to 7. In each clock both turn by the same angle.", 13
    )
    return canvas.finish()


def relative_buckets() -> str:
    """The buckets of a relative bias, by its own function, both ways and looking back only."""
    canvas = Canvas(960, 690, "The buckets of a relative position bias")
    config = preset("t5")
    biases = [RelativeBias(config, bidirectional=both) for both in (True, False)]
    size, cell = 16, 24
    for x, bias, name in zip((70, 520), biases, ("encoder: both ways", "decoder: looking back"), strict=True):
        places = torch.arange(size)
        buckets = bias.bucket(places[None, :] - places[:, None]).tolist()
        half = 16 if bias.bidirectional else 32

        def color(bucket, half=half):
            return blend(PAPER, STRONG_BLUE if bucket < half else STRONG_ORANGE, 0.12 + 0.8 * (bucket % half) / half)

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
    for bias, stroke, label in zip(biases, (STRONG_ORANGE, STRONG_BLUE), ("encoder, one side", "decoder"), strict=True):
        steps = bias.bucket(-distances).tolist()
        points = []
        for distance, bucket in enumerate(steps[:-1]):
            level = y + high * (1 - bucket / 31)
            points += [(x + wide * distance / 160, level), (x + wide * (distance + 1) / 160, level)]
        canvas.line(points, stroke, 2)
        canvas.text(x + wide - 6, points[-1][1] + 14, label, 12, "end", fill=stroke)
    ticks = [(x + wide * (d + 0.5) / 160, str(d)) for d in (0, 8, 16, 32, 64, 96, 128)]
    _axis(canvas, x, y + high, wide, ticks, "distance in tokens (32 buckets, relative_attention_max_distance=128)")
    return canvas.finish()
