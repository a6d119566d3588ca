"""All families: chosen by the official `model_type` on the way in and by a config's fields on the way out.

The families of `articles` have no `model_type` and no way out; they are chosen only by name. The file of a family is
loaded when it is first needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import transformers
from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.quiet import quiet
from blockformer.model.axes import axes

from ..arguments import check_family
from . import index
from .base import Family
from .head import RELEASED

__all__ = ["ARTICLES", "FAMILIES", "Family", "family_by_name", "family_for", "family_of"]


LEAST_ALIKE = 0.2
"""The share of common settings below which an unknown type is like no family, such as a model of pictures."""


@cache
def _load(name: str) -> Family:
    records = vars(index.module_of(name)).values()
    return next(each for each in records if isinstance(each, Family) and each.name == name)


class _Families(Mapping[str, Family]):
    """The families of these names that the installed release of transformers has."""

    def __init__(self, names: Sequence[str]):
        self._names = names

    def __getitem__(self, name: str) -> Family:
        if name in self._names and _is_released(family := _load(name)):
            return family
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if _is_released(_load(name)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_released(family: Family) -> bool:
    return family.is_file or family.settings.config_class in RELEASED


FAMILIES: Mapping[str, Family] = _Families(index.NAMES)
ARTICLES: Mapping[str, Family] = _Families(index.ARTICLES)


def family_by_name(name: str) -> Family:
    """The family of this name.

    Raises:
        ConversionError: there is none; the near one is named.
    """
    check_family(name)
    return FAMILIES[name] if name in index.NAMES else ARTICLES[name]


def family_of(official: Mapping[str, Any]) -> Family:
    """The family of an official `config.json`.

    Raises:
        ConversionError: it has no `model_type`, or one that is not supported.
    """
    model_type = official.get("model_type")
    if not isinstance(model_type, str):
        raise ConversionError("config.json: model_type is missing; set it, or name the family")
    if model_type in index.OUT_OF_REACH:
        raise ConversionError(
            f"config.json: model_type {shown(model_type)} is not supported: {index.OUT_OF_REACH[model_type]}; run the "
            "model with transformers"
        )
    wanted = index.FORMER_TYPES.get(model_type, model_type)
    names = [name for name in index.NAMES if index.MODEL_TYPES.get(name, name) == wanted]
    alike = [FAMILIES[name] for name in names if name in FAMILIES]
    if not alike:
        if not names and (spelled := _other_spelling(model_type)):
            raise ConversionError(
                f'config.json: model_type {shown(model_type)} is not known; write "model_type": "{spelled}"'
            )
        lacks = f" by transformers {transformers.__version__}; install a newer one" if names else ""
        said = f"model_type {shown(model_type)} is not supported{lacks}{nearest(official)}"
        raise ConversionError(f"config.json: {said}. docs/supported.md lists every type that is")

    def is_meant(family: Family) -> bool:
        named = family.names.named(official)
        return bool(named) and named[0] in {head.official for head in family.heads}

    return next(filter(is_meant, alike), alike[0])


def _other_spelling(model_type: str) -> str | None:
    """The type that has the same letters and digits, such as "bert" for "BERT"."""

    def letters(name: str) -> str:
        return "".join(filter(str.isalnum, name)).lower()

    wanted = letters(model_type)
    known = (index.MODEL_TYPES.get(name, name) for name in index.NAMES)
    return next((name for name in known if letters(name) == wanted), None)


def nearest(official: Mapping[str, Any]) -> str:
    """A hint at the families whose configs are most like one of an unknown type, and what they do not understand."""
    common = set(PretrainedConfig().to_dict()) | {"model_type", "architectures", "auto_map"}
    said = set(official) - common
    if not said:
        return ""

    def likeness(family: Family) -> float:
        fields = set(family.settings.defaults.to_dict()) - common
        return len(said & fields) / len(said | fields)

    def told(family: Family) -> str:
        strange = [shown(name) for name in family.settings.unused(official) if name not in common]
        return f"'{family.name}'" + (f", which does not know {', '.join(strange[:12])}" if strange else "")

    with quiet():
        best = sorted(FAMILIES.values(), key=likeness, reverse=True)[:2]
        best = [family for family in best if likeness(family) >= LEAST_ALIKE]
        return f"; its settings are closest to {'; and to '.join(map(told, best))}" if best else ""


def official_names(config_class: type[PretrainedConfig]) -> dict[str, str]:
    """Field of an official config -> the field of one of our config classes that means it."""
    ours: dict[str, str] = {}
    for family in FAMILIES.values():
        meanings = family.settings.meanings.items()
        ours |= {theirs: meant[0] for theirs, meant in meanings if meant[0] in axes(config_class)}
    return ours


def family_for(config: PretrainedConfig) -> Family:
    """The family that can express a Blockformer config; the most demanding one if several can.

    Raises:
        ConversionError: none can; what keeps the nearest one from it is listed.
    """
    alike = [family for family in FAMILIES.values() if family.has_topology_of(config)] or list(FAMILIES.values())
    differences: dict[str, list[str]] = {}

    def has_no_head(family: Family) -> bool:
        return bool(config.architectures) and config.architectures[0] not in {head.ours for head in family.heads}

    def least(family: Family) -> tuple[bool, int]:
        """The least that its distance can be, by its fixed settings."""
        unequal = sum(getattr(config, name, value) != value for name, value in family.settings.constant.items())
        return has_no_head(family), unequal if family.names.head_for(config) is not None else 0

    def distance(name: str) -> tuple[bool, int, int]:
        family = FAMILIES[name]
        return has_no_head(family), len(differences[name]), alike.index(family)  # of equals, the first

    with quiet():
        for family in sorted(alike, key=least):
            if differences and distance(min(differences, key=distance))[:2] < least(family):
                break
            differences[family.name] = family.differences(config)
    name = min(differences, key=distance)
    if differences[name]:
        model = (config.architectures or [type(config).__name__])[0]
        raise ConversionError(
            f"no official family can express this config of {model}; the nearest, '{name}', would need:"
            f"{listed(differences[name])}"
        )
    return FAMILIES[name]


def twins_of(family: Family, config: PretrainedConfig) -> list[str]:
    """Families of the same record file that also express a Blockformer config, such as XLM-RoBERTa next to RoBERTa."""
    file = index.module_of(family.name)
    others = [FAMILIES[name] for name in FAMILIES if name != family.name and index.module_of(name) is file]
    with quiet():
        return [
            other.name
            for other in others
            if other.has_topology_of(config) and not other.differences(config) and other.names.head_for(config)
        ]
