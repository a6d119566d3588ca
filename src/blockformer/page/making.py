"""The page of a source: a folder, a Hub id, a config or a preset."""

from pathlib import Path
from typing import Any

from blockformer.conversion import ConversionError
from blockformer.conversion.loading import load_any, load_tokenizer
from blockformer.presets import preset

from ..files.sources import WEIGHT_CHOICES
from ..summary import summarize
from .build import MAX_BYTES, page
from .facts import Facts
from .reading import read

MAX_TOKENS = 160
"""Tokens of a text that a page shows at most: more are too small to be told apart."""


def page_of(src: str, text: str | None = None, beside: str | None = None, **reading: Any) -> str:
    """The HTML of a model's page, of 3 MB at most.

    Args:
        src: a folder, a Hub id, a `config.json` or a preset.
        text: the text that the model reads on the page; needs weights and a tokenizer.
        beside: a source to compare it with.
        reading: which files of `src` are read, and from where; see `blockformer.convert`.

    Raises:
        ConversionError: a source cannot be used, or has no weights or no tokenizer for the text.
    """
    if text is not None and src in preset() and not Path(src).exists():
        raise ConversionError(f"text (--text) needs weights, and the preset {src} has none: name the folder of a model")
    other = None if beside is None else summarize(beside)
    summary = summarize(src, **{name: value for name, value in reading.items() if name not in WEIGHT_CHOICES})
    facts = Facts(summary.config)
    reference = None if other is None else (other.name.removeprefix("preset "), _reference(other.config, facts))
    if text is None:
        return page(facts, summary.name, summary.notes, reference)
    try:
        model, folder = load_any(src, **reading)
    except (ConversionError, OSError) as error:
        raise ConversionError(f"text (--text) needs weights: {error}") from error
    tokenizer = load_tokenizer(src, folder, ", which text (--text) needs")
    max_tokens = min(MAX_TOKENS, model.config.max_position_embeddings)
    while True:
        told = read(model, tokenizer, text, max_tokens)
        lengths = [len(side["tokens"]) for side in told["sides"]]
        made = page(Facts(summary.config, lengths[0], lengths[-1]), summary.name, summary.notes, reference, told)
        if len(made.encode()) <= MAX_BYTES or max_tokens <= 4:
            return made
        max_tokens = max(4, min(max_tokens, lengths[0]) * 7 // 10)


def _reference(config: Any, ours: Facts) -> Facts:
    """The facts of a reference; one that names no model, such as a preset, has a head for words where ours has one."""
    head = type(config).auto_classes.get("AutoModelForMaskedLM")
    if not config.architectures and head and ours.parts.has_language_model_head:
        config.architectures = [head.rpartition(".")[2]]
    return Facts(config)
