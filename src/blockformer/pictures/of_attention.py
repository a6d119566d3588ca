"""Pictures of attention: masks, grouped heads, what a cache keeps."""

import torch

from ..model.compat import causal_masks, create_bidirectional_mask, encoder_masks
from ..model.configuration_encoder_decoder import BlockformerEncoderDecoderConfig
from ..presets import preset
from .canvas import GREY, HIDDEN, INK, PAPER, STRONG_BLUE, STRONG_ORANGE, TIMES, Canvas, blend


def masks() -> str:
    """The three masks of an encoder-decoder, by the functions that the stack calls."""
    canvas = Canvas(960, 400, "Padding mask, causal mask and the mask of cross-attention")
    source, target = ["I", "like", "tea", "pad", "pad"], ["<s>", "ich", "mag", "Tee", "pad"]
    settings = preset("transformer-base", hidden_size=16, num_attention_heads=2).to_dict()
    config = BlockformerEncoderDecoderConfig.from_dict(settings, attn_implementation="eager")
    config.layer_types = ["full_attention"]
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
            "stack.Stack.plan",
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
                words, color = ("1", PAPER) if sees else ("0", "#8b949e")
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
            color = blend(PAPER, STRONG_ORANGE, 0.45) if group % 2 == 0 else blend(PAPER, STRONG_ORANGE, 0.8)
            center = x + (head + 0.5) * step
            kv_center = x + (group + 0.5) * 8 * step / kinds
            canvas.line([(center, 100 + size), (kv_center, 190)], GREY, 1.2)
            canvas.rect(center - size / 2, 100, size, size, color, None, rx=5)
            canvas.text(center, 100 + size / 2, f"q{head + 1}", 11)
        for group in range(kinds):
            color = blend(PAPER, STRONG_BLUE, 0.35) if group % 2 == 0 else blend(PAPER, STRONG_BLUE, 0.6)
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
    canvas = Canvas(960, 450, "Training reads all positions at once, inference one token per step, with a cache")
    read, write = ["<s>", "ich", "mag", "grünen", "Tee"], ["ich", "mag", "grünen", "Tee", "</s>"]
    cell, y = 46, 128
    for x, title, below in (
        (95, "training: all positions at once", "one forward pass, labels known"),
        (590, "inference: one token per step", "keys and values of earlier tokens are kept"),
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
                    fill = HIDDEN if x < 400 else PAPER
                elif x < 400 or column == row:
                    fill = STRONG_ORANGE
                else:
                    fill = blend(PAPER, STRONG_BLUE, 0.45)
                if fill != PAPER:
                    canvas.rect(x + column * cell + 2, y + row * cell + 2, cell - 4, cell - 4, fill, None, rx=4)
            canvas.arrow((x + 5 * cell + 4, middle), (x + 5 * cell + 24, middle))
            canvas.text(x + 5 * cell + 30, middle, write[row], 12, "start")
            if x > 400:
                canvas.text(x - 62, middle, f"step {row + 1}", 12, "end", fill=GREY)
    for x, fill, words in (
        (60, STRONG_ORANGE, "key and value of this pass"),
        (340, blend(PAPER, STRONG_BLUE, 0.45), "key and value from the cache (DynamicCache)"),
        (730, HIDDEN, "hidden by the causal mask"),
    ):
        canvas.rect(x, 388, 18, 18, fill, None, rx=3)
        canvas.text(x + 26, 397, words, 12, "start")
    canvas.text(480, 430, "Both compute the same logits, because each token attends to the same tokens.", 13)
    return canvas.finish()
