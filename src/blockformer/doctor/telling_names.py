"""What names and shapes show before any family is known: several models, an adapter, flat parameters, empty tensors."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from blockformer.files.quantized import OUR_BITS, lost_quantization, quantized_entries
from blockformer.files.safetensors_io import HasHeader
from blockformer.files.telling_tensors import (
    OF_LORA,
    computed_weights,
    empty_tensors,
    of_another_framework,
    unmerged_adapter,
)

from .finding import ERROR, Finding, counted
from .kin import all_known_beginnings, kin
from .prefixes import unwrapped

FEWEST = 4
"""Known names under a beginning that make it a model's."""


def not_a_model(
    names: Collection[str], tensors: Mapping[str, HasHeader], entries: Mapping[str, object], known: Collection[str]
) -> Finding | None:
    """What is there in place of one model; None if names and shapes do not show that.

    Args:
        names: of the tensors, without what is renamed or dropped.
        tensors: name in the file -> header.
        entries: of `config.json`.
        known: names that a model of this config has, or models of all families.
    """
    if all(OF_LORA.search(name) for name in names) and (adapter := unmerged_adapter(names)):
        return Finding("adapter", ERROR, *adapter)
    if computed := computed_weights(names):
        return Finding("adapter", ERROR, *computed)
    if foreign := of_another_framework(names, known):
        return Finding("framework", ERROR, *foreign)
    is_told = quantized_entries(entries) or entries.get(OUR_BITS)
    if not is_told and (packed := lost_quantization(tensors)):
        return Finding("quantization", ERROR, *packed)
    return _several(names, known) or _empty(tensors)


def of_adapter(tensors: Mapping[str, HasHeader]) -> list[Finding]:
    """What is wrong with the tensors of an adapter."""
    empty = _empty(tensors)
    return [] if empty is None else [empty]


def of_another_family(names: Collection[str], unknown: Collection[str], family: str) -> list[Finding]:
    """Whether all tensors fit another family, where the family of `config.json` lacks some.

    Args:
        names: of all tensors, as they are in the file.
        unknown: the names that the family of `config.json` does not have.
        family: its name.
    """
    if not unknown:
        return []
    plain = unwrapped(names, all_known_beginnings()).names
    fitting = [name for name, share in kin([*plain]) if share == 1]
    if not fitting or family in fitting or not {*unknown} & {*plain}:
        return []
    said = f"config.json says {family}, and the tensors have the names of {', '.join(fitting[:4])}"
    fix = "copy the config.json of its base model, or name the base model with --against"
    return [Finding("family", ERROR, said, fix, names=tuple(fitting))]


def _several(names: Collection[str], known: Collection[str]) -> Finding | None:
    """Several models, each with its own prefix, such as a teacher and a student."""
    plain = _without_common_beginning(names)
    groups: dict[str, int] = defaultdict(int)
    of_heads = {f"{name.partition('.')[0]}." for name in plain if name in known}
    for name in plain:
        start, _, rest = name.partition(".")
        groups["" if name in known else f"{start}." if rest in known else "-"] += 1
    found = [start for start, count in groups.items() if start not in {"-", *of_heads} and count >= FEWEST]
    if len(found) < 2:
        return None
    said = " and ".join(f"{counted(groups[start], 'name')} that {_begins(start)}" for start in sorted(found))
    head = next(iter(names))[: len(next(iter(names))) - len(next(iter(plain)))]
    others = [start for start in sorted(found) if start]
    fix = " or ".join(f"--drop '{head}{start}*'" for start in others)
    return Finding("several", ERROR, f"there are several models: {said}", f"leave out those that are not meant: {fix}")


def _begins(start: str) -> str:
    return f"begin with {start!r}" if start else "have no such beginning"


def _without_common_beginning(names: Collection[str]) -> list[str]:
    plain = list(names)
    while plain and len({name.partition(".")[0] for name in plain}) == 1 and all("." in name for name in plain):
        plain = [name.partition(".")[2] for name in plain]
    return plain


def _empty(tensors: Mapping[str, HasHeader]) -> Finding | None:
    said = empty_tensors(tensors)
    return None if said is None else Finding("empty", ERROR, *said)
