"""What the card of a source says to the Hub: license, languages, data, the model that it was made of."""

import os
import re
from typing import Any

import yaml

from .checkpoint import Checkpoint
from .regular import open_regular

CARD = "README.md"
KEYS = ("license", "license_name", "license_link", "language", "datasets", "base_model")
BLOCK = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
LONGEST = 1 << 16
MOST = 200
"""Entries of one list."""


def front_matter(checkpoint: Checkpoint) -> dict[str, str | list[str]]:
    """The entries of a source's card that are as true of a conversion of it; none where they cannot be read.

    Only texts and lists of texts are taken: whatever else YAML can say is left. `huggingface_hub.ModelCard` reads the
    whole file, however long, and takes the language `no` for false and a name such as 2024-01-01 for a date.
    """
    if checkpoint.is_file or not os.path.lexists(checkpoint.path(CARD)):
        return {}
    with open_regular(checkpoint.member(CARD)) as file:
        found = BLOCK.match(file.read(LONGEST).decode("utf-8", "replace"))
    try:
        # BaseLoader makes texts, lists and dicts of them, and nothing else.
        entries = yaml.load(found[1], yaml.BaseLoader) if found else None  # nosec B506
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: value for key in KEYS if (value := _texts(entries.get(key)))}


def _texts(value: Any) -> str | list[str] | None:
    if isinstance(value, str):
        return value if value.isprintable() else None
    if isinstance(value, list) and 0 < len(value) <= MOST and all(isinstance(each, str) for each in value):
        return [each for each in value if each.isprintable()]
    return None
