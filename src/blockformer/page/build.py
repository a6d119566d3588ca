"""One HTML file of a model: no server, no network, everything in it."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockformer.conversion.summary import shown_settings

from ..pictures.canvas import palette_style, themed
from .differences import differences
from .facts import KINDS, Facts
from .fields import plain

PARTS = Path(__file__).parent / "parts"
LIMIT = 3_000_000
"""Bytes that a page has at most."""


def page(
    facts: Facts, name: str, notes: Sequence[str] = (), reference: tuple[str, Facts] | None = None, text: Any = None
) -> str:
    """The page of a model.

    Args:
        name: what the model is called.
        notes: findings that the reader should know of.
        reference: the name and the facts of a model to compare with.
        text: what `reading.read` gave, or None.
    """
    beside = None if reference is None else differences(facts, reference[1], reference[0])
    figures = facts.figures(frozenset(beside["boxes"]) if beside else frozenset())
    words = f"{facts.length:,} tokens"
    if facts.config.is_encoder_decoder:
        words = f"{facts.length:,} source and {facts.target:,} target tokens"
    settings = shown_settings(facts.config)
    data = {
        "name": name,
        "sentence": facts.sentence(),
        "totals": facts.totals(),
        "notes": [*notes, *_left_out(facts)],
        "words": words,
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
    script = _part("page.js") + _part("text.js")
    style = palette_style() + _part("page.css")
    pieces = {
        "policy": html.escape(_policy(script, style)),
        "title": html.escape(name),
        "style": style,
        "figures": "".join(f"<div>{themed(figure['svg'])}</div>" for figure in figures),
        # No "<" at all: nothing in a string can end the element that holds it, or begin another one.
        "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"<!--(\w+)-->", lambda match: pieces[match[1]], _part("page.html"))


def _left_out(facts: Facts) -> list[str]:
    most = max(len(stack.kinds) for stack in facts.parts.stacks)
    return [f"There are {most} kinds of layers; the first {KINDS} are shown."] if most > KINDS else []


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """Nothing is fetched from anywhere, and no script or style runs but this page's own."""
    hashes = (base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in (script, style))
    own, styles = (f"'sha256-{one}'" for one in hashes)
    return f"default-src 'none'; script-src {own}; style-src {styles}; base-uri 'none'; form-action 'none'"
