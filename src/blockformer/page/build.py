"""One HTML file of a model: no server, no network, everything in it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pictures.document import document, themed
from ..summary import shown_settings
from .differences import differences
from .facts import MAX_KINDS, Facts
from .fields import plain

PARTS = Path(__file__).parent / "parts"
MAX_BYTES = 3_000_000
"""Bytes that a page has at most."""


def page(
    facts: Facts, name: str, notes: Sequence[str] = (), reference: tuple[str, Facts] | None = None, text: Any = None
) -> str:
    """The page of a model.

    Args:
        name: the model's name.
        notes: findings that the reader should know of.
        reference: the name and the facts of a model to compare with.
        text: what `reading.read` gave, or None.
    """
    beside = None if reference is None else differences(facts, reference[1], reference[0])
    figures = facts.figures(frozenset(beside["boxes"]) if beside else frozenset())
    settings = shown_settings(facts.config)
    data = {
        "name": name,
        "sentence": facts.sentence(),
        "totals": facts.totals(),
        "notes": [*notes, *_left_out(facts)],
        "words": facts.text_length,
        "wide": len(facts.parts.stacks) > 1,
        "shared": facts.parts.stacks[0].sharing > 1,
        "figures": [figure["label"] for figure in figures],
        "boxes": facts.boxes(),
        "settings": {
            group: {field: plain(value) for field, value in fields.items()} for group, fields in settings.items()
        },
        "beside": beside,
        "text": text,
    }
    pieces = {
        "figures": "".join(f"<div>{themed(figure['svg'])}</div>" for figure in figures),
        # No "<" at all: nothing in a string can end the element that holds it, or begin another one.
        "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    body = re.sub(r"<!--(\w+)-->", lambda match: pieces[match[1]], _part("page.html"))
    return document(name, _part("page.css"), body, _part("page.js") + _part("text.js"))


def _left_out(facts: Facts) -> list[str]:
    kinds = max(len(stack.kinds) for stack in facts.parts.stacks)
    return [f"There are {kinds} kinds of layers; the first {MAX_KINDS} are shown."] if kinds > MAX_KINDS else []


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")
