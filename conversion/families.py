"""Every family, told apart by the official `model_type` on the way in and by a config's fields on the way out."""

import difflib
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from . import bert, distilbert, gpt2, llama, mistral, qwen2, qwen3, roberta, t5
from .errors import ConversionError, listed, shown
from .family import Family

__all__ = ["FAMILIES", "Family", "family_by_name", "family_for", "family_of"]

# On the way out the first that can express a config is taken: the more a family demands, the earlier it stands.
_KNOWN = (
    *(qwen3.FAMILY, qwen2.FAMILY, llama.FAMILY, mistral.FAMILY),
    *(distilbert.FAMILY, roberta.FAMILY, roberta.XLM, bert.FAMILY),
    *(t5.UMT5, t5.T5, t5.MT5),
    gpt2.FAMILY,
)
FAMILIES: dict[str, Family] = {family.name: family for family in _KNOWN}


def family_by_name(name: str) -> Family:
    """The family of this name.

    Raises:
        ConversionError: there is none; the near one is named.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    near = difflib.get_close_matches(name, FAMILIES, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise ConversionError(f"there is no family {shown(name)}; there are {', '.join(sorted(FAMILIES))}.{hint}")


def family_of(official: Mapping[str, Any]) -> Family:
    """The family of an official `config.json`.

    Raises:
        ConversionError: it has no `model_type`, or one that is not supported.
    """
    model_type = official.get("model_type")
    if not isinstance(model_type, str):
        raise ConversionError("config.json: model_type is missing; set it, or name the family")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConversionError(f"config.json: model_type {shown(model_type)} is not supported; there are {known}")
    return FAMILIES[model_type]


def family_for(config: PretrainedConfig) -> Family:
    """The family that can express a config of ours; the most demanding one if several can.

    Raises:
        ConversionError: none can; what keeps the nearest one from it is listed.
    """
    alike = [family for family in FAMILIES.values() if family.has_topology_of(config)] or FAMILIES.values()
    differences = {family.name: family.differences(config) for family in alike}
    name = min(differences, key=lambda name: len(differences[name]))  # of equals, the first
    if differences[name]:
        raise ConversionError(
            f"no official family can express this config; the nearest, '{name}', would need:{listed(differences[name])}"
        )
    return FAMILIES[name]
