"""The figure of any model: its stacks side by side, one layer of each opened, every box where it really is."""

from .anatomy import Anatomy, Box, LayerKind, StackAnatomy, SubLayer
from .canvas import (
    BLUE,
    GREY,
    HIDDEN,
    INK,
    LEAF,
    LIGHT,
    ORANGE,
    PANEL,
    PAPER,
    PINK,
    PURPLE,
    QUERY,
    STRONG_BLUE,
    TIMES,
    YELLOW,
    Canvas,
    words_width,
)

FILLS = {
    "embedding": PINK, "positions": PAPER, "norm": YELLOW, "attention": ORANGE, "feed-forward": BLUE, "head": PURPLE,
}  # fmt: skip
KIND_FILLS = (QUERY, STRONG_BLUE, LEAF, PURPLE, YELLOW, PINK)
# Of a column: where its boxes start, how wide they are, where it ends.
LANE, BOX, COLUMN, GAP = 122, 284, 500, 46
CHIP, SMALL = 10.5, 11.5


def figure(anatomy: Anatomy, opened: int = 0, title: str = "", marks=()) -> str:
    """The SVG of a model.

    Args:
        opened: which kind of layers is opened in each stack, the last one where there are fewer.
        title: for screen readers.
        marks: paths of boxes to mark as different from a reference.
    """
    drawings = [Column(stack, opened, frozenset(marks)) for stack in anatomy.stacks]
    draft = Canvas(10, 10, "")
    layers_top = [drawing.draw(draft, 0.0, 0.0) for drawing in drawings]
    heads_top = drawings[-1].draw_heads(draft, anatomy, 0.0, layers_top[-1])
    turn = min(layers_top) if len(drawings) == 1 else layers_top[0] - 34
    height = round(-min(heads_top, turn) + 14)
    width = COLUMN * len(drawings) + GAP * (len(drawings) - 1)
    canvas = Canvas(width, height, title)
    for index, drawing in enumerate(drawings):
        top = drawing.draw(canvas, index * (COLUMN + GAP), float(height))
        if index == len(drawings) - 1:
            drawing.draw_heads(canvas, anatomy, index * (COLUMN + GAP), top)
    if len(drawings) == 2:
        _join(canvas, drawings[0], drawings[1], height + layers_top[0])
    return canvas.finish()


def _join(canvas: Canvas, encoder: "Column", decoder: "Column", top: float) -> None:
    """The encoder's states go to the cross-attention of every layer of the decoder."""
    middle, lane = encoder.x + BOX / 2, COLUMN + GAP / 2
    target = decoder.cross
    canvas.line([(middle, top), (middle, top - 24), (lane, top - 24)], STRONG_BLUE, 2)
    canvas.arrow((lane, top - 24), (lane, target), (decoder.x, target), color=STRONG_BLUE, width=2)
    canvas.text(middle + 10, top - 10, "states of the source, keys and values", SMALL, "start", fill=GREY)


class Column:
    """One stack: drawn from below, y falling."""

    def __init__(self, stack: StackAnatomy, opened: int, marks: frozenset[str]):
        self.stack, self.marks = stack, marks
        self.opened = min(opened, len(stack.kinds) - 1)
        self.kind = stack.kinds[self.opened]
        self.x = self.cross = self.attention = 0.0

    def draw(self, canvas: Canvas, left: float, bottom: float) -> float:
        """Everything but what stands on the stack; gives the top."""
        self.left, self.x = left, left + LANE
        middle = self.x + BOX / 2
        canvas.text(middle, bottom - 14, self.stack.reads, 13)
        y = bottom - 26
        canvas.arrow((middle, y), (middle, y - 18))
        y = self.embed(canvas, y - 18)
        entrance = y
        y = self.layers(canvas, y)
        if self.stack.attended is not None:
            self.attended(canvas, entrance)
        for box in self.stack.above:
            canvas.arrow((middle, y), (middle, y - 18))
            y = self.box(canvas, box, self.x, y - 18, BOX)
        return y

    def draw_heads(self, canvas: Canvas, anatomy: Anatomy, left: float, y: float) -> float:
        """What stands on the last stack."""
        middle = left + LANE + BOX / 2
        for box in anatomy.heads:
            canvas.arrow((middle, y), (middle, y - 18))
            y = self.box(canvas, box, left + LANE, y - 18, BOX)
        canvas.arrow((middle, y), (middle, y - 22))
        words = "states of the tokens"
        if anatomy.has_language_model_head:
            words = "softmax: the next token" if self.stack.name == "decoder" else "softmax: the masked tokens"
        elif anatomy.heads:
            words = "scores" if anatomy.heads[-1].role != "head.pooler" else "a vector for the text"
        canvas.text(middle, y - 32, words, 13)
        return y - 40

    def embed(self, canvas: Canvas, y: float) -> float:
        """The tables side by side, their sum, and what it passes through."""
        tables = self.stack.embeddings
        middle, gap = self.x + BOX / 2, 6
        width = BOX if len(tables) == 1 else 176 if len(tables) == 2 else 130
        rest = (BOX - width - gap * (len(tables) - 1)) / max(len(tables) - 1, 1)
        tops, x = [], self.x
        for index, table in enumerate(tables):
            wide = rest if index else width
            tops.append(self.box(canvas, table, x, y, wide))
            x += wide + gap
        if self.stack.projected is not None:
            canvas.arrow((middle, tops[0]), (middle, tops[0] - 16))
            tops[0] = self.box(canvas, self.stack.projected, self.x, tops[0] - 16, width)
        y = min(tops)
        if len(tables) > 1 or self.stack.added is not None:
            plus = y - 26
            x = self.x
            for index, top in enumerate(tops):
                wide = rest if index else width
                if index == 0:
                    canvas.arrow((middle, top), (middle, plus + 11))
                else:
                    canvas.arrow((x + wide / 2, top), (x + wide / 2, plus), (middle + 11, plus))
                x += wide + gap
            canvas.plus(middle, plus)
            if self.stack.added is not None:
                added = self.side_box(canvas, self.stack.added, plus + 24)
                canvas.arrow((added, plus), (middle - 11, plus))
            y = plus - 11
        for box in self.stack.after:
            canvas.arrow((middle, y), (middle, y - 16))
            y = self.box(canvas, box, self.x, y - 16, BOX)
        return y

    def side_box(self, canvas: Canvas, box: Box, bottom: float) -> float:
        """A box in the lane, its title in two lines; gives its right edge."""
        first, _, last = box.title.partition(" ")
        self.open(canvas, box)
        self.frame(canvas, box, self.left + 8, bottom - 48, 88, 48)
        canvas.text(self.left + 52, bottom - (33 if last else 24), first, 12, bold=True)
        canvas.text(self.left + 52, bottom - 16, last, 12, bold=True)
        canvas.close_group()
        return self.left + 96

    def attended(self, canvas: Canvas, entrance: float) -> None:
        """Positions that enter the attention of each layer, by a line along the lane."""
        box = self.stack.attended
        assert box is not None
        bottom = entrance + (0 if self.stack.added is None else -40)
        self.side_box(canvas, box, bottom)
        if self.kind.is_positioned:
            x = self.left + 52
            canvas.arrow((x, bottom - 48), (x, self.attention), (self.x, self.attention), color=GREY)
            label = "q, k" if box.role.endswith("rotary_emb") else "scores"
            canvas.text(x + 5, self.attention - 9, label, SMALL, "start", fill=GREY)

    def layers(self, canvas: Canvas, y: float) -> float:
        """The opened layer on its panel, and the strip of all layers next to it."""
        middle = self.x + BOX / 2
        draft = Canvas(10, 10, "")
        bottom = y - 20
        top = self.layer(draft, bottom) - 20
        words, own = [word for word in self.kind.title.split(", ") if word], self.kind.own
        if own is not None:
            self.open(canvas, own)
        canvas.rect(self.x - 20, top, BOX + 62, bottom - top, PANEL, LIGHT, rx=12)
        if own is not None:
            canvas.text(self.x - 10, top + 12, own.title, SMALL, "start", bold=True)
            self.mark(canvas, own, self.x - 20, top)
            canvas.close_group()
        for index, word in enumerate(words, own is not None):
            canvas.text(self.x - 10, top + 12 + 13 * index, word, 10.5, "start", fill=GREY)
        self.strip(canvas, top, bottom)
        canvas.line([(middle, y), (middle, bottom)])
        end = self.layer(canvas, bottom)
        canvas.line([(middle, end + 8), (middle, top - 4)])
        return top - 4

    def strip(self, canvas: Canvas, top: float, bottom: float) -> None:
        """A cell for each layer, the first at the bottom, in the color of its kind."""
        kind_of = {layer: index for index, kind in enumerate(self.stack.kinds) for layer in kind.layers}
        count, x = self.stack.count, self.x + BOX + 60
        high = min(16.0, (bottom - top - 34) / count)
        start = (top + bottom + count * high) / 2 + 8
        canvas.text(x + 8, start - count * high - 16, f"{TIMES} {count}", 15, bold=True)
        for layer in range(count):
            fill = KIND_FILLS[kind_of[layer] % len(KIND_FILLS)]
            is_open = kind_of[layer] == self.opened
            gap = 2 if high > 5 else 0.5
            left, wide = (x - 3, 22) if is_open and len(self.stack.kinds) > 1 else (x, 16)
            canvas.rect(left, start - (layer + 1) * high, wide, high - gap, fill, None, 2.0)
        for index, word in enumerate(("layers", "shared") if self.stack.sharing > 1 else ("layers",)):
            canvas.text(x + 8, start + 10 + 12 * index, word, 10, fill=GREY)

    def layer(self, canvas: Canvas, y: float) -> float:
        """The sub-layers of the opened kind, from the panel's bottom; gives the y where the states leave."""
        if self.kind.parallel:
            return self.parallel(canvas, y)
        for sub in self.kind.sublayers:
            y = self.sublayer(canvas, self.kind, sub, y)
        return y - 8

    def sublayer(self, canvas: Canvas, kind: LayerKind, sub: SubLayer, y: float) -> float:
        """post(x + output(f(pre(x)))), x after its input norm; the line around leaves before pre and ends at plus."""
        middle, out = self.x + BOX / 2, self.x + BOX + 22

        def stacked(box: Box, y: float) -> float:
            canvas.arrow((middle, y), (middle, y - 15))
            return self.box(canvas, box, self.x, y - 15, BOX)

        if "input" in sub.norms:
            y = stacked(sub.norms["input"], y)
        canvas.line([(middle, y), (middle, y - 9)])
        y = bend = y - 9
        if "pre" in sub.norms:
            y = stacked(sub.norms["pre"], y)
        low, y = y, stacked(sub.f, y)
        self.note(sub, (low - 15 + y) / 2)
        if "output" in sub.norms:
            y = stacked(sub.norms["output"], y)
        y = self.multiply(canvas, kind, y)
        canvas.line([(middle, y), (middle, y - 10)])
        y -= 21
        canvas.plus(middle, y)
        canvas.arrow((middle, bend), (out, bend), (out, y), (middle + 11, y))
        y -= 11
        if "post" in sub.norms:
            y = stacked(sub.norms["post"], y)
        return y

    def multiply(self, canvas: Canvas, kind: LayerKind, y: float) -> float:
        """The factor of what a sub-layer adds, next to its line."""
        if kind.multiplier is None:
            return y
        canvas.line([(self.x + BOX / 2, y), (self.x + BOX / 2, y - 16)])
        canvas.text(self.x + BOX / 2 + 8, y - 10, f"{TIMES} {kind.multiplier:.3g}", SMALL, "start", fill=GREY)
        return y - 16

    def note(self, sub: SubLayer, y: float) -> None:
        """Remember where lines from elsewhere enter."""
        if sub.f.mask == "cross":
            self.cross = y
        elif sub.f.kind == "attention":
            self.attention = y

    def parallel(self, canvas: Canvas, y: float) -> float:
        """Attention and feed-forward side by side, both from the same states."""
        attention, mlp = self.kind.sublayers
        middle, half, out = self.x + BOX / 2, (BOX - 8) / 2, self.x + BOX + 22
        left, right = self.x + half / 2, self.x + BOX - half / 2
        canvas.line([(middle, y), (middle, y - 9)])
        y = bend = y - 9
        if "pre" in mlp.norms:
            canvas.line([(middle, y), (middle, y - 8)])
            canvas.line([(left, y - 8), (right, y - 8)])
            tops = []
            for x, sub in ((left, attention), (right, mlp)):
                canvas.arrow((x, y - 8), (x, y - 22))
                tops.append(self.box(canvas, sub.norms["pre"], x - half / 2, y - 22, half))
            y = min(tops)
        else:
            canvas.arrow((middle, y), (middle, y - 15))
            y = self.box(canvas, attention.norms["pre"], self.x, y - 15, BOX)
        tops = []
        for x, sub in ((left, attention), (right, mlp)):
            canvas.arrow((x, y), (x, y - 16))
            tops.append(self.box(canvas, sub.f, x - half / 2, y - 16, half))
        self.note(attention, (y - 16 + tops[0]) / 2)
        y = self.multiply(canvas, self.kind, min(tops) - 16)
        plus = y - 26
        canvas.arrow((left, tops[0]), (left, plus), (middle - 11, plus))
        canvas.arrow((right, tops[1]), (right, plus + 26), (middle, plus + 26), (middle, plus + 11))
        canvas.arrow((middle, bend), (out, bend), (out, plus), (middle + 11, plus))
        canvas.plus(middle, plus)
        return plus - 19

    def open(self, canvas: Canvas, box: Box) -> None:
        """Start a box: a page makes a button of it."""
        label = ", ".join(word for word in (box.title, box.size, *box.chips) if word)
        canvas.open_group(class_="box", data_path=box.path, data_role=box.role, aria_label=label)

    def frame(self, canvas: Canvas, box: Box, x: float, y: float, width: float, height: float) -> None:
        """Its outline, with a sign where a reference has another."""
        canvas.rect(x, y, width, height, FILLS[box.kind])
        self.mark(canvas, box, x, y)

    def mark(self, canvas: Canvas, box: Box, x: float, y: float) -> None:
        """The sign where a reference has another, at the corner of a box."""
        if box.path in self.marks:
            canvas.circle(x + 2, y + 2, 9, INK, None)
            canvas.text(x + 2, y + 2, "\N{NOT EQUAL TO}", 13, bold=True, fill=PAPER)

    def box(self, canvas: Canvas, box: Box, x: float, bottom: float, width: float) -> float:
        """A box with its title, sizes, heads or experts, and chips; gives its top."""
        middle = x + width / 2
        rows = _rows(box.chips, width - 16)
        mask = bool(box.mask) and width > 200
        free = width - 72 if mask else width
        pieces = 22 + 15 * bool(box.size) + 20 * len(rows) + _extra(box)
        height = max(pieces + 8, 52 if mask else 30)
        top = bottom - height
        self.open(canvas, box)
        self.frame(canvas, box, x, top, width, height)
        y = top + 15
        canvas.text(middle, y, box.title, _fitting(box.title, free, 13.5), bold=True)
        if box.size:
            y += 16
            canvas.text(middle, y, box.size, _fitting(box.size, free, SMALL), fill=GREY)
        y += 13
        if box.heads:
            _heads(canvas, x + 12, y, width - 24, *box.heads)
        elif box.experts:
            _experts(canvas, x + 12, y, width - 24, *box.experts)
        y += _extra(box)
        for row in rows:
            wide = sum(map(_chip_width, row)) + 5 * (len(row) - 1)
            start = middle - wide / 2
            for chip in row:
                canvas.rect(start, y, _chip_width(chip), 16, PAPER, LIGHT, 8.0, 1)
                canvas.text(start + _chip_width(chip) / 2, y + 8, chip, CHIP)
                start += _chip_width(chip) + 5
            y += 20
        if mask:
            _mask(canvas, x + width - 36, top + 7, box.mask)
        canvas.close_group()
        return top


def _fitting(words: str, width: float, size: float) -> float:
    """A size of letters by which words stay in a box."""
    return min(size, size * (width - 12) / max(words_width(words, size), 1))


def _chip_width(chip: str) -> float:
    return words_width(chip, CHIP) + 12


def _rows(chips: tuple[str, ...], width: float) -> list[list[str]]:
    """Chips in as many rows as they need."""
    rows: list[list[str]] = []
    room = 0.0
    for chip in chips:
        if not rows or room < _chip_width(chip) + 5:
            rows.append([])
            room = width
        rows[-1].append(chip)
        room -= _chip_width(chip) + 5
    return rows


def _extra(box: Box) -> int:
    if box.heads:
        return 28
    return 8 * ((box.experts[0] - 1) // 32 + 1) + 6 if box.experts else 0


def _heads(canvas: Canvas, x: float, y: float, width: float, count: int, kinds: int) -> None:
    """Query heads above, below them the key/value heads, each as wide as the queries that it serves."""
    step = min(width / count, 20.0)
    x += (width - step * count) / 2
    gap = 2 if step > 6 else 0.6
    for head in range(count):
        canvas.rect(x + head * step, y, step - gap, 9, QUERY, None, 1.5)
    wide = step * count / kinds
    for head in range(kinds):
        canvas.rect(x + head * wide, y + 11, wide - gap, 9, STRONG_BLUE, None, 1.5)


def _experts(canvas: Canvas, x: float, y: float, width: float, count: int, each: int) -> None:
    """A cell for each expert, a token's experts filled."""
    columns = min(count, 32)
    step = min(width / columns, 14.0)
    x += (width - step * columns) / 2
    for expert in range(count):
        row, column = divmod(expert, 32)
        fill = STRONG_BLUE if expert < each else PAPER
        canvas.rect(x + column * step, y + 8 * row, step - 1.5, 6.5, fill, GREY, 1.0, 0.6)


def _mask(canvas: Canvas, x: float, y: float, mask: str) -> None:
    """What a token sees, in small: a row is a token that looks, a column one that is looked at."""
    size, window = 7, 2

    def sees(row: int, column: int) -> bool:
        near = not mask.endswith("window") or abs(row - column) <= window
        return near and (column <= row or not mask.startswith("causal"))

    colors = [[STRONG_BLUE if sees(row, column) else HIDDEN for column in range(size)] for row in range(size)]
    canvas.cells(x, y, 4, colors)
    for place in range(1, size):
        canvas.line([(x + 4 * place, y), (x + 4 * place, y + 28)], ORANGE, 0.8)
        canvas.line([(x, y + 4 * place), (x + 28, y + 4 * place)], ORANGE, 0.8)
