"""The classes that `architectures` of an official `config.json` names.

Training wraps a model, and some wrappers leave their own name there: FSDP puts its letters before the class's name, a
compiled or adapted model names its wrapper only.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from blockformer.files.errors import ConversionError, shown

from .head import Head
from .index import NAMES

FSDP = "FSDP"
"""What it puts before the name of a class."""
BEFORE = (FSDP, "TF", "Flax")
"""What may stand before the name of a class whose weights are the class's own."""
WRAPPERS = ("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "PeftModel")
"""Beginnings of the names of classes that only contain a model."""
COLBERT = "HF_ColBERT"
"""The class of ColBERT's own code (Khattab and Zaharia, 2020): an encoder, and a projection of each of its states."""


def named_classes(official: Mapping[str, Any], heads: Iterable[Head], former: Mapping[str, str]) -> list[str]:
    """The names in `architectures` as today's classes have them.

    Args:
        official: the `config.json`.
        heads: of the family.
        former: earlier names of its classes -> today's.
    """
    known = {head.official for head in heads}

    def known_name(name: str) -> str:
        found = former.get(name, name)
        for start in BEFORE if found not in known else ():
            inner = name.removeprefix(start)
            if inner != name and former.get(inner, inner) in known:
                return former.get(inner, inner)
        return found if found in known else next((each for each in known if _letters(each) == _letters(found)), found)

    return [known_name(name) for name in official.get("architectures") or []]


def _letters(name: str) -> str:
    """A name without what its spellings differ in, such as LLaMAForCausalLM and Ernie4_5_ForCausalLM."""
    return name.replace("_", "").lower()


def _task(name: str) -> str:
    """What a class is for, by its name."""
    return name.partition("For")[2]


def unknown_class(
    official: Mapping[str, Any], heads: Sequence[Head], fitting: Head | None, what: str
) -> ConversionError:
    """The error for `architectures` that no class of a family has.

    Args:
        official: the `config.json`.
        heads: the ones to choose from.
        fitting: the one that the tensors show, if they were read.
        what: the family, in words.
    """
    named = official.get("architectures") or []
    if COLBERT in named:
        return ConversionError(
            f"config.json: architectures is {shown(named)}, ColBERT's own class, whose projection no class of "
            "transformers has. sentence-transformers writes it as a separate module: "
            "MultiVectorEncoder(FOLDER).save_pretrained(NEW); convert NEW"
        )
    known: Collection[str] = dict.fromkeys(head.official for head in heads)
    why = "which cannot be converted"
    if any(name.startswith(WRAPPERS) for name in named):
        why = "the name of a wrapper and not of the model in it"
    said = f"config.json: architectures is {shown(named)}, {why}; of {what} there are {', '.join(known) or 'none'}"
    model_type = official.get("model_type")
    if model_type in NAMES and not what.startswith(shown(model_type)):
        said += f". Its model_type is {shown(model_type)}: leave out the family"
    elif fitting is not None:
        said += f'. If this is one of them, write "architectures": ["{fitting.official}"], which fits the tensors'
    elif known:
        tasks = {_task(name) for name in named} - {""}
        likely = next((each for each in known if _task(each) in tasks), next(iter(known)))
        said += f'. If this is one of them, write its name there, as in "architectures": ["{likely}"]'
    return ConversionError(said)
