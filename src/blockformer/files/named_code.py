"""What JSON files name for another program to import: code to load, and classes by their dotted names."""

import re
from collections.abc import Iterator
from typing import Any

from .config_file import NEVER_FOLLOWED
from .names import BODIES, MODULES

LARGE_JSON = ("tokenizer.json", "vocab.json")
"""Data of any size, which name no code."""
LOADED = (*NEVER_FOLLOWED, "custom_pipelines")
"""Entries by which transformers loads code of a repo."""
ACTIVATIONS = ("activation_function", "activation_fn", "sbert_ce_default_activation_function")
"""Entries by which sentence-transformers imports an activation."""
CLASSES = (*ACTIVATIONS, "tokenizer_class")
OTHER_REPO = "tokenizer_name_or_path"
"""An entry of a model's settings in sentence-transformers: the repo that its tokenizer, and that one's code, is of."""
KNOWN = re.compile(r"(sentence_transformers|pylate)(\.[A-Za-z]\w*)*\.[A-Z]\w*", re.ASCII)
"""A class of sentence-transformers, or of PyLate, which is built on it."""
PURE = ("torch.nn.", "transformers.activations.")
"""Where the classes of activations are, which do nothing but compute."""


def entries_in(content: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of what a JSON file holds, however deep."""
    waiting = [content]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield from each.items()
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def loads_code(name: str, value: Any) -> bool:
    """Whether an entry names code that transformers would load, of this repo or of another."""
    return name in LOADED and bool(value) and (not isinstance(value, str) or "/" in value or name == "custom_generate")


def imports_other(name: str, value: Any) -> bool:
    """Whether an entry names a class to import that is not of PyTorch, transformers or sentence-transformers."""
    if name not in CLASSES or not isinstance(value, str) or "." not in value:
        return False
    return not (KNOWN.fullmatch(value) or (name in ACTIVATIONS and value.startswith(PURE)))


def names_code(content: Any) -> tuple[str, Any] | None:
    """The first entry of a JSON file's content that names code other than that of these libraries; None: none does."""
    return next((each for each in entries_in(content) if loads_code(*each) or imports_other(*each)), None)


def foreign_modules(name: str, content: Any) -> list[Any]:
    """The classes of modules that a JSON file of sentence-transformers names and that are not of that library.

    Args:
        name: the file's name, without folders; only two kinds of files name modules.
        content: what it holds, which may be damaged.
    """
    if name == MODULES:
        modules = content if isinstance(content, list) else [None]
        kinds = [module.get("type") if isinstance(module, dict) else module for module in modules]
    else:  # the settings of a Router
        types = content.get("types") if isinstance(content, dict) and "structure" in content else None
        kinds = list(types.values()) if isinstance(types, dict) else []
    return [kind for kind in kinds if not (isinstance(kind, str) and KNOWN.fullmatch(kind))]


def other_repo(name: str, content: Any) -> Any:
    """The repo that a tokenizer would be taken from, with the code that it names; None: the tokenizer is this repo's.

    Args:
        name: the file's name, without folders; only settings of a model among modules name one.
        content: what it holds, which may be damaged.
    """
    return content.get(OTHER_REPO) if name in BODIES and isinstance(content, dict) else None
