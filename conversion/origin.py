"""What a converted repo records of the official checkpoint that it came from, so that the way back is exact."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConversionError
from .families.fields import Form
from .families.registry import FAMILIES, Family
from .files.checkpoint import json_text, read_json

ORIGIN = "conversion.json"
"""The file of the record. A repo without it is converted back by its settings alone."""


@dataclass(frozen=True)
class Origin:
    """The record.

    Attributes:
        family: the official family.
        config: the official `config.json`.
        form: how the official checkpoint was written; None in repos of early versions.
        unused: names of tensors that no model uses; they are stored beside the weights.
    """

    family: Family
    config: dict[str, Any]
    form: Form | None
    unused: list[str]

    def text(self) -> str:
        """The file's text."""
        assert self.form is not None
        form = {"head": self.form.head, "traits": sorted(self.form.traits), "sizes": self.form.sizes}
        return json_text({"family": self.family.name, "form": form, "unused": self.unused, "config": self.config})


def read_origin(folder: Path) -> Origin | None:
    """The record of a repo, or None if it has none.

    Raises:
        ConversionError: it is damaged.
    """
    path = folder / ORIGIN
    if not os.path.lexists(path):
        return None
    entries = read_json(path)
    name, official, form, unused = (entries.get(key) for key in ("family", "config", "form", "unused"))
    unused = entries.get("kept") if unused is None else unused  # as repos of early versions have it
    damaged = ConversionError(f"{path}: damaged; delete it, it is not needed")
    if not isinstance(name, str) or name not in FAMILIES or not isinstance(official, dict):
        raise damaged
    if form is None:
        return Origin(FAMILIES[name], official, None, [])
    if not isinstance(form, dict) or not all(map(_is_names, ([form.get("head")], form.get("traits"), unused))):
        raise damaged
    sizes = form.get("sizes", {})
    if not isinstance(sizes, dict) or not all(isinstance(size, list) for size in sizes.values()):
        raise damaged
    earlier = Form(form["head"], frozenset(form["traits"]), {name: tuple(size) for name, size in sizes.items()})
    try:
        FAMILIES[name].head(earlier)
    except StopIteration:
        raise damaged from None
    return Origin(FAMILIES[name], official, earlier, list(unused or []))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
