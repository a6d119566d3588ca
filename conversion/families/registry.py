"""All families: chosen by the official `model_type` on the way in and by a config's fields on the way out.

Those of `articles` have no `model_type` and no way out; they are chosen only by name.
"""

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PretrainedConfig

from ..arguments import check_family
from ..articles import encoder_decoder as article_encoder_decoder
from ..articles import gpt as article_gpt
from ..articles import transformer as article_transformer
from ..errors import ConversionError, listed, shown
from ..quiet import quiet
from . import (
    albert,
    arcee,
    bart,
    bart_decoder,
    bert,
    bloom,
    cohere,
    deberta_v2,
    distilbert,
    dots1,
    electra,
    ernie,
    ernie4_5_moe,
    eurobert,
    exaone4,
    falcon,
    gemma,
    glm,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granitemoe,
    helium,
    jais2,
    llama,
    m2m_100,
    marian,
    megatron_bert,
    ministral,
    mistral,
    mixtral,
    modernbert,
    mpnet,
    mpt,
    nemotron,
    olmo,
    olmoe,
    opt,
    persimmon,
    phi,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    roberta,
    rotary_bert,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
    t5,
    t5gemma,
)
from .base import Family
from .fields import RELEASED

__all__ = ["ARTICLES", "FAMILIES", "Family", "family_by_name", "family_for", "family_of"]

# On the way out the first that can express a config is taken: the more a family demands, the earlier it stands.
_KNOWN = (
    *(qwen3.FAMILY, qwen2.FAMILY, llama.FAMILY, mistral.FAMILY),
    *(phi.PHI3, phi.PHI, olmo.OLMO2, olmo.OLMO3, olmo.OLMO, gemma.GEMMA, gemma.GEMMA2, gemma.GEMMA3, gemma.VAULT),
    *(granite.FAMILY, ministral.MINISTRAL, ministral.CWM, smollm3.FAMILY, arcee.FAMILY, helium.FAMILY, seed_oss.FAMILY),
    *(exaone4.FAMILY, glm.GLM, glm.GLM4, cohere.COHERE, cohere.COHERE2, starcoder2.FAMILY, nemotron.FAMILY),
    *(jais2.FAMILY, stablelm.FAMILY, gpt_neox.FAMILY, persimmon.FAMILY, gptj.GPTJ, gptj.CODEGEN, falcon.FAMILY),
    *(bloom.FAMILY, mpt.FAMILY, opt.FAMILY, modernbert.DECODER),
    *(qwen3_moe.FAMILY, qwen2_moe.FAMILY, mixtral.FAMILY, olmoe.OLMOE, olmoe.FLEX_OLMO),
    *(dots1.FAMILY, glm4_moe.FAMILY, ernie4_5_moe.FAMILY, gpt_oss.FAMILY, granitemoe.FAMILY, granitemoe.SHARED),
    *(distilbert.FAMILY, roberta.FAMILY, roberta.XLM, roberta.CAMEMBERT, roberta.DATA2VEC, bert.FAMILY),
    *(roberta.XL, roberta.PRE_NORM, megatron_bert.FAMILY, ernie.FAMILY, electra.FAMILY, albert.FAMILY),
    *(rotary_bert.JINA, rotary_bert.NOMIC, rotary_bert.GTE, modernbert.ENCODER, eurobert.FAMILY),
    *(deberta_v2.FAMILY, mpnet.FAMILY),
    *(t5.UMT5, t5.T5, t5.MT5, t5gemma.FAMILY),
    *(marian.FAMILY, bart.MBART, bart.BART, bart.PLBART, bart.BLENDERBOT, marian.PEGASUS, m2m_100.FAMILY),
    *(gpt2.FAMILY, gpt_bigcode.FAMILY),
    bart_decoder.BartDecoderFamily(bart.BART, "Bart"),
    bart_decoder.BartDecoderFamily(bart.MBART, "MBart"),
    bart_decoder.BartDecoderFamily(marian.FAMILY, "Marian"),
    bart_decoder.BartDecoderFamily(bart.PLBART, "PLBart"),
    bart_decoder.BartDecoderFamily(bart.BLENDERBOT, "Blenderbot"),
    bart_decoder.BartDecoderFamily(marian.PEGASUS, "Pegasus"),
)
_TYPES = {family.model_type for family in _KNOWN}
# Those that the installed release of transformers has.
FAMILIES: dict[str, Family] = {family.name: family for family in _KNOWN if family.config_class_name in RELEASED}
_ARTICLES = (article_gpt.FAMILY, article_encoder_decoder.FAMILY, article_transformer.FAMILY)
ARTICLES: dict[str, Family] = {family.name: family for family in _ARTICLES}


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
        lacks = f" by transformers {transformers.__version__}; install a newer one" if model_type in _TYPES else ""
        said = f"model_type {shown(model_type)} is not supported{lacks}{nearest(official)}"
        raise ConversionError(f"config.json: {said}. There are {known}")
    named = (official.get("architectures") or [None])[0]
    return next((family for family in alike if named in {head.official for head in family.heads}), alike[0])


def nearest(official: Mapping[str, Any]) -> str:
    """A hint at the families whose configs are most like one of an unknown type, and what they do not understand."""
    common = set(PretrainedConfig().to_dict()) | {"model_type", "architectures", "auto_map"}
    said = set(official) - common
    if not said:
        return ""

    def likeness(family: Family) -> float:
        fields = set(family.defaults.to_dict()) - common
        return len(said & fields) / len(said | fields)

    def told(family: Family) -> str:
        strange = [shown(name) for name in family.unused(official) if name not in common]
        return f"'{family.name}'" + (f", which does not know {', '.join(strange[:12])}" if strange else "")

    with quiet():
        best = sorted(FAMILIES.values(), key=likeness, reverse=True)[:2]
        return f"; its settings are most like those of {'; and of '.join(map(told, best))}"


def family_for(config: PretrainedConfig) -> Family:
    """The family that can express a config of ours; the most demanding one if several can.

    Raises:
        ConversionError: none can; what keeps the nearest one from it is listed.
    """
    alike = [family for family in FAMILIES.values() if family.has_topology_of(config)] or list(FAMILIES.values())
    differences: dict[str, list[str]] = {}

    def has_no_head(family: Family) -> bool:
        return bool(config.architectures) and config.architectures[0] not in {head.ours for head in family.heads}

    def least(family: Family) -> tuple[bool, int]:
        """What its distance is at least, told by its fixed settings alone."""
        unequal = sum(getattr(config, name, value) != value for name, value in family.fixed.items())
        return has_no_head(family), unequal if family.head_for(config) is not None else 0

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
