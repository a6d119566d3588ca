"""Pictures of the whole: the figure of the paper, and the two orders of a layer's norms."""

import re

import torch

from ..model.modeling_decoder import BlockformerDecoderForCausalLM
from ..model.modeling_encoder import BlockformerEncoderForMaskedLM
from ..presets import preset
from .anatomy import anatomy
from .canvas import BLUE, GREEN, GREY, ORANGE, PANEL, PAPER, PINK, PURPLE, STRONG_ORANGE, TIMES, YELLOW, Canvas
from .figure import BOX, COLUMN, LANE, figure


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

    canvas.rect(left - 45, 412, width + 70, 282, PANEL, GREY, rx=12)
    canvas.rect(right - 25, 268, width + 70, 426, PANEL, GREY, rx=12)
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
    canvas.text(mid_right - 12, cross_top + cross + 12, "Q", 12, "end", bold=True)
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
    canvas.box(395, 704, 180, 48, PAPER, "Positional encoding", "SinusoidalPositions", 13)
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
    canvas.text(30, 60, "names as in src/blockformer/model.", 13, "start", fill=GREY)
    canvas.text(30, 100, "Drawn with the norm after the sum,", 13, "start", fill=GREY)
    canvas.text(30, 120, 'norm_placement="post".', 12, "start", mono=True, fill=GREY)
    canvas.text(30, 160, "BERT is only the left half,", 13, "start", fill=GREY)
    canvas.text(30, 180, "GPT-2 and Qwen3 the right half", 13, "start", fill=GREY)
    canvas.text(30, 200, "without the middle attention.", 13, "start", fill=GREY)
    return canvas.finish()


def add_and_norm() -> str:
    """One encoder layer with the norm after and before the sum."""
    canvas = Canvas(920, 570, "Add and norm: post order and pre order side by side")
    for x, name, formula, note in (
        (70, "post", "norm(x + f(x))", "the orange line meets a norm after every sum"),
        (530, "pre", "x + f(norm(x))", "the orange line meets no norm inside the layers"),
    ):
        middle, width = x + 140, 280
        canvas.text(middle, 28, f'norm_placement="{name}"', 15, bold=True, mono=True)
        canvas.text(middle, 52, formula, 15, mono=True, fill=GREY)
        canvas.rect(x - 20, 124, width + 75, 372, PANEL, GREY, rx=12)
        canvas.text(x - 8, 482, "Layer", 12, "start", mono=True, fill=GREY)
        canvas.text(middle, 522, "x [B, T, C]", 13)
        canvas.text(middle, 550, note, 12.5, fill=STRONG_ORANGE)
        y = 484.0
        canvas.line([(middle, 510), (middle, y)])
        for sublayer, code, fill in (("Attention", "self_attn", ORANGE), ("Feed forward", "mlp", BLUE)):
            canvas.line([(middle, y), (middle, y - 16)])
            boxes = {"norm": ("norm", f"{code}_{name}_norm", YELLOW), "f": (sublayer, code, fill)}
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


def models() -> str:
    """BERT and Qwen3 side by side, each drawn from its own modules."""
    with torch.device("meta"):
        bert = BlockformerEncoderForMaskedLM(preset("bert-base"))
        qwen3 = BlockformerDecoderForCausalLM(preset("qwen3-0.6b"))
    drawn = [(name, figure(anatomy(model), title=name)) for name, model in (("BERT", bert), ("Qwen3-0.6B", qwen3))]
    heights = [int(re.findall(r'height="(\d+)"', svg)[0]) for _, svg in drawn]
    canvas = Canvas(COLUMN * 2 + 20, max(heights) + 40, "BERT and Qwen3-0.6B, each drawn from its own modules")
    for index, ((name, svg), height) in enumerate(zip(drawn, heights, strict=True)):
        x, y = index * (COLUMN + 20), max(heights) - height
        canvas.parts.append(svg.replace("<svg ", f'<svg x="{x}" y="{y}" ', 1).strip())
        canvas.text(x + LANE + BOX / 2, max(heights) + 18, name, 17, bold=True)
    return canvas.finish()
