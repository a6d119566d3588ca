"""JSON files, read strictly: nothing that two readers could take in two ways. Imports no torch."""

import json
import math
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import CheckpointError, shown
from .regular import open_regular, refuse_pointer

MAX_BYTES = 100_000_000
"""Of a file; the limit of the safetensors library for its headers."""
MAX_DEPTH = 64
"""Nesting of JSON. Real files have four levels; hundreds would end in a RecursionError."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape in a JSON string that may be half of a surrogate pair."""


def json_text(entries: Mapping[str, Any] | list[Any]) -> str:
    """Entries as the text of a JSON file."""
    return json.dumps(entries, indent=2, ensure_ascii=False) + "\n"


INFINITY = {"__float__": "Infinity"}
"""How transformers 5 writes a number that JSON lacks."""


def read_json(path: str | PathLike[str], infinite: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file: UTF-8, no repeated names, no NaN or Infinity.

    Args:
        path: the file.
        infinite: whether an Infinity is taken for `INFINITY`, in whose place earlier releases of transformers wrote it.

    Raises:
        CheckpointError: the file is anything else, or not a regular file.
    """
    entries = read_json_value(path, infinite)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: holds a {type(entries).__name__} where a JSON object is needed")
    return entries


def read_json_value(path: str | PathLike[str], infinite: bool = False) -> Any:
    """Read any JSON value from a file; see `read_json`."""
    path = Path(path)
    with open_regular(path) as file:
        text = file.read(MAX_BYTES + 1)
    refuse_pointer(text, path)
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"longer than {MAX_BYTES} bytes")
        return strict_json(text, infinite)
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error


def strict_json(text: bytes, infinite: bool = False) -> Any:
    """Parse strict JSON: UTF-8 only, no repeated names, no NaN or Infinity (see `read_json`), limited nesting.

    Raises:
        ValueError: saying what is wrong.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"the key {shown(twice)} appears twice; keep one")
        return entries

    def refuse(constant: str) -> dict[str, str]:
        if infinite and constant == "Infinity":
            return dict(INFINITY)
        raise ValueError(f"{constant} is not a JSON value; use a number or null")

    def finite(number: str) -> float:
        if math.isinf(float(number)):
            raise ValueError(f"{shown(number)} is too large a number")
        return float(number)

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
        _check_depth(value)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair in a string, which is not Unicode text") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _check_depth(value: Any) -> None:
    """Refuse JSON that parses but is too deep to walk through."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (
            entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, (dict, list))
        )
        level = [child for children in inner for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise ValueError("nested too deeply")
