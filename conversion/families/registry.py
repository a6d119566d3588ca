"""All families: chosen by the official `model_type` on the way in and by a config's fields on the way out.

Those of `articles` have no `model_type` and no way out; they are chosen only by name.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from ..arguments import check_family
from ..articles import models as articles
from ..errors import ConversionError, listed, shown
from . import (
    bart,
    bart_decoder,
    bert,
    distilbert,
    dots1,
    ernie4_5_moe,
    gpt2,
    gpt_neox,
    llama,
    marian,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    roberta,
    t5,
)
from .base import Family

__all__ = ["ARTICLES", "FAMILIES", "Family", "family_by_name", "family_for", "family_of"]

# On the way out the first that can express a config is taken: the more a family demands, the earlier it stands.
_KNOWN = (
    *(qwen3.FAMILY, qwen2.FAMILY, llama.FAMILY, mistral.FAMILY),
    *(phi3.FAMILY, olmo2.FAMILY, gpt_neox.FAMILY),
    *(qwen3_moe.FAMILY, qwen2_moe.FAMILY, mixtral.FAMILY, olmoe.OLMOE, olmoe.FLEX_OLMO),
    *(dots1.FAMILY, ernie4_5_moe.FAMILY),
    *(distilbert.FAMILY, roberta.FAMILY, roberta.XLM, bert.FAMILY),
    *(t5.UMT5, t5.T5, t5.MT5),
    *(marian.FAMILY, bart.MBART, bart.BART),
    gpt2.FAMILY,
    bart_decoder.BartDecoderFamily(bart.BART, "Bart"),
    bart_decoder.BartDecoderFamily(bart.MBART, "MBart"),
    bart_decoder.BartDecoderFamily(marian.FAMILY, "Marian"),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _KNOWN}
ARTICLES: dict[str, Family] = {family.name: family for family in articles.FAMILIES}


def family_by_name(name: str) -> Family:
    """The family of this name.

    Raises:
        ConversionError: there is none; the near one is named.
    """
    check_family(name)
    return {**FAMILIES, **ARTICLES}[name]


def family_of(official: Mapping[str, Any]) -> Family:
    """The family of an official `config.json`.

    Raises:
        ConversionError: it has no `model_type`, or one that is not supported.
    """
    model_type = official.get("model_type")
    if not isinstance(model_type, str):
        raise ConversionError("config.json: model_type is missing; set it, or name the family")
    alike = [family for family in FAMILIES.values() if family.model_type == model_type]
    if not alike:
        known = ", ".join(sorted({family.model_type for family in FAMILIES.values()}))
        raise ConversionError(f"config.json: model_type {shown(model_type)} is not supported; there are {known}")
    named = (official.get("architectures") or [None])[0]
    return next((family for family in alike if named in {head.official for head in family.heads}), alike[0])


def family_for(config: PretrainedConfig) -> Family:
    """The family that can express a config of ours; the most demanding one if several can.

    Raises:
        ConversionError: none can; what keeps the nearest one from it is listed.
    """
    alike = [family for family in FAMILIES.values() if family.has_topology_of(config)] or FAMILIES.values()
    differences = {family.name: family.differences(config) for family in alike}

    def distance(name: str) -> tuple[bool, int]:
        has_head = not config.architectures or config.architectures[0] in {head.ours for head in FAMILIES[name].heads}
        return not has_head, len(differences[name])

    name = min(differences, key=distance)  # of equals, the first
    if differences[name]:
        model = (config.architectures or [type(config).__name__])[0]
        raise ConversionError(
            f"no official family can express this config of {model}; the nearest, '{name}', would need:"
            f"{listed(differences[name])}"
        )
    return FAMILIES[name]
