"""Entries of `config.json` that no config class takes, put right before anything is planned: types of layers, tokens.

The classes refuse such a config whatever the tensors are, and nothing else could be said of the checkpoint.
"""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockformer.conversion.families.registry import family_of
from blockformer.conversion.values import ENDS
from blockformer.files.errors import ConversionError, shown
from blockformer.files.generation_settings import TOKENS

from .around import ids_in, special_tokens_in
from .finding import ERROR, WARNING, Finding, counted, entries_set

OF_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d{1,4})\.")


@dataclass
class Settled:
    """What was put right.

    Attributes:
        entries: of `config.json`, as the class takes them.
        tokens: entries that are beyond the vocabulary, taken out of `entries`.
        findings, changes: see `Diagnosis`.
    """

    entries: dict[str, Any]
    tokens: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


def settled(entries: Mapping[str, Any], names: Collection[str]) -> Settled:
    """The entries with as many types as layers, and without tokens that the vocabulary does not have.

    Args:
        entries: of `config.json`.
        names: of the tensors.
    """
    found = Settled(dict(entries))
    types, count = entries.get("layer_types"), entries.get("num_hidden_layers")
    if isinstance(types, list) and type(count) is int and len(types) != count:
        _settle_types(found, types, count, names)
    size = entries.get("vocab_size")
    if type(size) is int:
        found.tokens = {
            name: entries[name] for name in TOKENS if any(each >= size for each in ids_in(entries.get(name)))
        }
        found.entries |= dict.fromkeys(found.tokens)
    return found


def _settle_types(found: Settled, types: list[Any], count: int, names: Collection[str]) -> None:
    there = max((int(match[1]) for name in names if (match := OF_LAYER.search(name))), default=-1) + 1
    said = f"config.json: layer_types lists {counted(len(types), 'type')}, and num_hidden_layers is {count}"
    said += f"; the tensors are of {counted(there, 'layer')}" if there else ""
    new: dict[str, Any] = {}
    if there == len(types):
        new = {"num_hidden_layers": there}
    elif there == count and all(each == types[0] for each in types):
        new = {"layer_types": types[:1] * count}
    if new:
        found.findings.append(Finding("config", ERROR, said, f"write {json.dumps(new)[1:-1]}", True, tuple(new)))
        found.changes += entries_set(new)
    else:
        fix = "write one type for each layer, --set layer_types='[...]': the config.json of its base model has them"
        found.findings.append(Finding("layer-types", ERROR, said, fix, names=("layer_types",)))
    found.entries |= new or {"layer_types": None}


def of_tokens(found: Settled, entries: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What becomes of tokens that were beyond the vocabulary, as entries of `config.json`.

    Args:
        found: has them; takes the findings.
        entries: of `config.json`, with the vocabulary that the tensors have.
        folder: of the checkpoint, for its tokenizer.
    """
    size = entries.get("vocab_size")
    of_tokenizer = _known_tokens(folder)
    new: dict[str, Any] = {}
    for name, value in found.tokens.items():
        new[name] = value
        if type(size) is not int or all(each < size for each in ids_in(value)):
            continue
        said = f"config.json: {name} is {json.dumps(value)}, and the vocabulary has {size} tokens, up to id {size - 1}"
        token, number = of_tokenizer.get(name.removesuffix("_token_id"), ("", size))
        if number < size:
            new[name] = number
            fix = f'write "{name}": {number}, the id of {shown(token)} in the tokenizer'
            found.changes += entries_set({name: number})
        else:
            fix = f"write the id that the tokenizer has, or null, --set {name}=ID; if tokens were added for training, "
            fix += "these embeddings are from before"
        kind = WARNING if name in ENDS and value == _of_class(entries).get(name) else ERROR  # convert takes these
        found.findings.append(Finding("token-id", kind, said, fix, number < size, (name,)))
    return new


def _of_class(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What the official class of a config has where nobody says it."""
    with suppress(ConversionError):
        return family_of(entries).settings.defaults.to_dict()
    return {}


def _known_tokens(folder: Path) -> dict[str, tuple[str, int]]:
    try:
        return special_tokens_in(folder)
    except ConversionError:
        return {}
