"""Which families a checkpoint without a config may be of, by the names of its tensors only."""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache

from transformers import PretrainedConfig

from blockformer.conversion.families.head import Head
from blockformer.conversion.families.registry import FAMILIES, Family
from blockformer.conversion.rules.patterns import Pattern, Places, tuple_of
from blockformer.conversion.storage.variant import CheckpointVariant
from blockformer.files.errors import ConversionError
from blockformer.files.quiet import quiet
from blockformer.model.axes import axes

NEAR = 0.9
"""The share of a checkpoint's names that a family must have, to be named."""


@cache
def _patterns(name: str) -> tuple[tuple[Pattern, ...], frozenset[str]]:
    """The names of a family's tensors, with placeholders, and the weights that its first head has, without numbers.

    They are the names of the official class and of its files, with all heads, for a usual config.
    """
    family = FAMILIES[name]
    names: dict[str, None] = {}
    usual: frozenset[str] = frozenset()
    for head in family.heads:
        with quiet(errors=True):
            try:
                variant, config = _usual(family, head)
                rules = [*family.names.layout(variant, config).rules, *family.names.storage(variant, config)]
                traits = {each.name for several in family.names.alternatives(head) for each in several if each.ends}
                variants = [variant, *(replace(variant, traits=variant.traits | {each}) for each in sorted(traits))]
                spelled = [*map(family.names.spelled, variants)]
            except Exception:  # nosec B112 # a decoder's head of an encoder
                continue
        sources = [source for rule in rules for source in tuple_of(rule.source)]
        names |= dict.fromkeys(each.to_file(source) for each in spelled for source in sources)
        usual = usual or _without_numbers(map(spelled[0].to_file, sources))
    return tuple(Pattern(each) for each in names), usual


def _without_numbers(names: Iterable[str]) -> frozenset[str]:
    """The names of weights, with 0 in place of each number, so that all layers have the same names.

    Biases do not count: a family's rules name one for nearly every weight.
    """
    return frozenset(re.sub(r"\{\w+\}|\b\d+\b", "0", name) for name in names if name.endswith(".weight"))


def _usual(family: Family, head: Head) -> tuple[CheckpointVariant, PretrainedConfig]:
    """A usual config: the official class's defaults or, where ours refuses them, the family's preset."""
    official = {"architectures": [head.official]}
    variant = family.names.variant_of(official, None)
    try:
        return variant, family.settings.our_config(family.config_from(official, variant))
    except ConversionError:
        chosen = {} if family.preset is None else dict(family.preset.settings)
        known = {name: each.default for name, each in axes(head.config_class).items()} | chosen
        settings = {name: value(known) if callable(value) else value for name, value in chosen.items()}
        config = head.config_class(architectures=[head.ours], **settings)
        return family.names.variant_for(config), config


def kin(names: Collection[str]) -> list[tuple[str, float]]:
    """Families with the share of the names that they have, the likeliest first; at least `NEAR`."""
    found = []
    held = _without_numbers(names)
    for family in FAMILIES:
        patterns, usual = _patterns(family)
        places = Places([[pattern] for pattern in patterns])
        hits = sum(any(each[2].match(name) is not None for each in places.near(name)) for name in names)
        if names and hits >= NEAR * len(names):
            found.append((family, hits / len(names), -len(usual - held)))
    found.sort(key=lambda each: (each[1], each[2]), reverse=True)
    return [(family, share) for family, share, lacking in found if (share, lacking) == found[0][1:]]


def all_known_beginnings() -> set[str]:
    """Names of one layer of every family, to find a prefix by where no config says the family."""
    filled = (pattern.fill(("0",) * len(pattern.fields)) for family in FAMILIES for pattern in _patterns(family)[0])
    return set(filled)
