"""Bounds on `tokenizer.json`: its output may not be thousands of times as long as the text.

The tokenizers library does what the file says. A few replacements in a row turn a word into terabytes, and where Python
would raise MemoryError, Rust ends the process.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from .errors import ConversionError
from .names import VOCABULARIES
from .regular import open_regular
from .sizes import format_size

MOST_BYTES = 1 << 28
"""The size up to which the files of a tokenizer are read; files of large vocabularies have a tenth of it."""
MOST_GROWTH = 1000
"""How many times as long as a text, or how many tokens longer, each part of a tokenizer may make it."""
PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
ADDED = ("prepend", "continuing_subword_prefix", "end_of_word_suffix")


def check_bounds(folder: Path) -> None:
    """Check the size of a tokenizer's files, and what `tokenizer.json` makes of a text.

    A file that cannot be read passes: loading it gives the error.

    Raises:
        ConversionError: naming the file and the part.
    """
    for name in VOCABULARIES:
        path = folder / name
        if os.path.lexists(path) and (size := path.lstat().st_size) > MOST_BYTES:
            most = format_size(MOST_BYTES)
            raise ConversionError(f"{path}: {format_size(size)}, and a tokenizer's file has {most} at most; remove it")
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        return
    try:
        entries = read_loosely(path)
        growth = {part: _growth(entries.get(part)) for part in PARTS} if isinstance(entries, dict) else {}
    except (ValueError, RecursionError):
        return
    for part, times in growth.items():
        if times > MOST_GROWTH:
            raise ConversionError(
                f"{path}: its {part} may make a text {times:.3g} times as long, and {MOST_GROWTH:,} times is the most "
                "that is accepted; remove what repeats or lengthens the text"
            )


def read_loosely(path: Path) -> Any:
    """The content of a large JSON file, as the tokenizers library reads it.

    Raises:
        ConversionError: it is not JSON.
    """
    with open_regular(path) as file:
        text = file.read(MOST_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path}: not valid JSON: {error}") from error


def _growth(part: Any) -> float:
    """How many times as long a text may become, at most, by one part or by several in a row."""
    if not isinstance(part, dict):
        return 1
    growth = math.prod(_growth(each) for name in LISTS for each in _list(part.get(name)))
    growth *= math.prod(1 + _length(part.get(name)) for name in ADDED)
    if isinstance(pattern := part.get("pattern"), dict):  # a regular expression may match between any two characters
        growth *= max(1, 1 + _length(part.get("content")) - _length(pattern.get("String")))
    for template in ("single", "pair"):
        growth *= max(1, _pieces(_list(part.get(template)), part.get("special_tokens")))
    return min(growth, 1e18)


def _pieces(template: list[Any], special_tokens: Any) -> int:
    """How many texts and tokens a template puts in a row."""
    known = special_tokens if isinstance(special_tokens, dict) else {}
    count = 0
    for piece in template:
        token = piece.get("SpecialToken") if isinstance(piece, dict) else None
        entry = known.get(token.get("id")) if isinstance(token, dict) and isinstance(token.get("id"), str) else None
        count += len(_list(entry.get("ids"))) if isinstance(entry, dict) else 1
    return count


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0
