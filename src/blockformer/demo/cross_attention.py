"""A picture of a translator's cross-attention, source against target.

Each row is a character that was written, each column a word that was read, and a cell says how much of the attention of
that character's step went to that word (`softmax(Q K^T / sqrt(D))`, the mean over the heads of a layer). A row sums
to 1. The picture is made of text and shapes (SVG): whatever shows it needs a font with the characters.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Fonts with Chinese characters on Linux, macOS, Windows and older Linux; a viewer takes the first that it has.
FONTS = ("Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", "WenQuanYi Zen Hei")
CELL = 0.56  # inches
GREY, GRID = "#444444", "#d0d0d0"
SHOWN = 0.05  # a smaller share is a shade without a figure
NO_MATPLOTLIB = "no picture of the cross-attention: it needs matplotlib (pip install matplotlib)"


@dataclass(frozen=True)
class CrossAttention:
    """What each written token looked at.

    Attributes:
        read: the S source tokens.
        written: the T tokens written.
        weights: float32 [layers, H, T, S]; row t belongs to the step that wrote `written[t]`, and sums to 1.
    """

    read: list[str]
    written: list[str]
    weights: torch.Tensor

    def layer(self, index: int) -> torch.Tensor:
        """The mean over the heads of a layer, [T, S]."""
        return self.weights[index].mean(0)

    def sharpness(self) -> torch.Tensor:
        """How decided each layer is, its heads taken together: the mean over the rows of the largest share. [layers]"""
        return self.weights.mean(1).amax(-1).mean(-1)


@torch.inference_mode()
def cross_attention(model, tokenizer, text: str, max_new_tokens: int = 40) -> CrossAttention:
    """Translate, then read the model's own answer again (teacher forcing) and record what each step looked at.

    Only the eager attention has probabilities to show; the model is given back with the one it had.

    Args:
        model: an encoder-decoder in evaluation mode.
        tokenizer: its tokenizer.
        text: one source text.
        max_new_tokens: of the answer.
    """
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    written = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)  # [1, 1 + T], start token first
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        outputs = model(**inputs, decoder_input_ids=written[:, :-1], output_attentions=True, use_cache=False)
    finally:
        model.set_attn_implementation(implementation)
    return CrossAttention(
        read=[label(tokenizer, token) for token in inputs["input_ids"][0]],
        written=[label(tokenizer, token) for token in written[0, 1:]],
        weights=torch.cat(outputs.cross_attentions).float().cpu(),
    )


def label(tokenizer, token) -> str:
    """A token as a reader knows it."""
    if token == tokenizer.eos_token_id:
        return "end"
    return tokenizer.decode([int(token)]).strip() or tokenizer.convert_ids_to_tokens(int(token))


def draw(attentions: list[CrossAttention], path: Path, layer: int | None = None) -> list[Path]:
    """Draw one panel for each text, side by side.

    Args:
        attentions: at least one; all of one model.
        path: an SVG file. A PNG of the same name is written too if a font of `FONTS` is installed to draw it with.
        layer: of the decoder, from 0; None takes the most decided one.

    Returns:
        The files written.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    layers, heads = attentions[0].weights.shape[:2]
    if layer is None:
        layer = int(sum(attention.sharpness() for attention in attentions).argmax())
    installed = [font for font in FONTS if font in {entry.name for entry in fontManager.ttflist}]
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "cross-attention",
        "font.sans-serif": ["DejaVu Sans"],
        "font.family": ["DejaVu Sans", *FONTS, "sans-serif"],
    }
    turned = max(len(word) for attention in attentions for word in attention.read) > 6
    top, left, bottom, between = 1.7 if turned else 1.35, 0.95, 0.15, 0.3  # inches, as all below
    width = max(sum(left + CELL * len(attention.read) + between for attention in attentions), 6.5)
    height = top + CELL * max(len(attention.written) for attention in attentions) + bottom
    with matplotlib.rc_context(settings), _fonts_may_be_missing():
        figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
        what = (
            f"cross-attention of decoder layer {layer + 1} of {layers}, mean of {heads} heads, in %; a row sums to 100"
        )
        figure.text(0.2 / width, 1 - 0.37 / height, "Which words each written character looks at", fontsize=14)
        figure.text(0.2 / width, 1 - 0.63 / height, what, fontsize=10, color=GREY)
        x = 0.0
        for attention in attentions:
            columns, rows = CELL * len(attention.read), CELL * len(attention.written)
            place = ((x + left) / width, (height - top - rows) / height, columns / width, rows / height)
            _panel(figure.add_axes(place), attention, attention.layer(layer), turned)
            x += left + columns + between
        files = [path, path.with_suffix(".png")] if installed else [path]
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


@contextmanager
def _fonts_may_be_missing() -> Iterator[None]:
    """No warnings about missing fonts: an SVG is drawn with its viewer's fonts."""
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
            yield
    finally:
        logger.setLevel(level)


def _panel(axes, attention: CrossAttention, weights: torch.Tensor, turned: bool) -> None:
    """One text: weights [T, S] as shades, the larger ones also in figures."""
    shares = weights.numpy()
    rows, columns = shares.shape
    axes.pcolormesh(np.ma.masked_less(shares, 0.01), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlim=(0, columns), ylim=(rows, 0))  # the first character is written on top
    slant = {"rotation": 45, "ha": "left", "rotation_mode": "anchor"} if turned else {}
    axes.set_xticks([column + 0.5 for column in range(columns)], attention.read, fontsize=11, **slant)
    axes.set_yticks([row + 0.5 for row in range(rows)], attention.written)
    for name in axes.get_yticklabels():
        name.set_fontsize(15 if len(name.get_text()) == 1 else 11)
    axes.set_xticks(range(columns + 1), minor=True)
    axes.set_yticks(range(rows + 1), minor=True)
    axes.grid(which="minor", color=GRID, linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("words read", fontsize=10, color=GREY, labelpad=6)
    axes.set_ylabel("characters written, downwards", fontsize=10, color=GREY)
    axes.spines[:].set(color=GRID, linewidth=0.6)
    for row, column in np.argwhere(shares >= SHOWN):
        share = shares[row, column]
        colour = "white" if share > 0.5 else "black"
        axes.text(column + 0.5, row + 0.5, f"{100 * share:.0f}", ha="center", va="center", fontsize=10, color=colour)


def draw_or_say_why_not(model, tokenizer, texts, path: Path, layer: int | None = None) -> str:
    """Draw the texts' cross-attention; returns a sentence on what was drawn, or on what is missing for it."""
    try:
        files = draw([cross_attention(model, tokenizer, text) for text in texts], path, layer)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return NO_MATPLOTLIB
    without = "" if len(files) > 1 else " (no PNG: no font with Chinese characters is installed)"
    return f"which characters look at which words: {', '.join(map(str, files))}{without}"
