"""Which families a checkpoint without a config may be of, by the names of its tensors only."""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache

from transformers import PretrainedConfig

from blockformer.conversion.families.composites import COMPOSITES
from blockformer.conversion.families.head import Head
from blockformer.conversion.families.registry import FAMILIES, Family
from blockformer.conversion.rules.patterns import Pattern, Places, tuple_of
from blockformer.conversion.storage.variant import CheckpointVariant
from blockformer.files.quiet import quiet
from blockformer.model.axes import axes

NEAR = 0.9
"""The share of a checkpoint's names that a family must have, to be named."""


@cache
def _patterns(name: str) -> tuple[tuple[Pattern, ...], tuple[frozenset[str], ...]]:
    """The names of a family's tensors, with placeholders, and the weights that its usual models have, without numbers.

    They are the names of the official class and of its files, with all heads. The weights are what the first head has.
    """
    family = FAMILIES[name]
    names: dict[str, None] = {}
    usual: dict[frozenset[str], None] = {}
    for head in family.heads:
        own: dict[frozenset[str], None] = {}
        for variant, config in _usual(family, head):
            with quiet(errors=True):
                try:
                    rules = [*family.names.layout(variant, config).rules, *family.names.storage(variant, config)]
                except Exception:  # nosec B112 # a decoder's head of an encoder
                    continue
            traits = {each.name for several in family.names.alternatives(head) for each in several if each.ends}
            variants = [variant, *(replace(variant, traits=variant.traits | {each}) for each in sorted(traits))]
            spelled = [*map(family.names.spelled, variants)]
            sources = dict.fromkeys(_any_numbers(source) for rule in rules for source in tuple_of(rule.source))
            names |= dict.fromkeys(each.to_file(source) for each in spelled for source in sources)
            own[_without_numbers(map(spelled[0].to_file, sources))] = None
        usual = usual or own
    return tuple(Pattern(each) for each in names), tuple(usual)


def _any_numbers(name: str) -> str:
    """A name with a placeholder in place of a number after a plural: which layer or expert it is says nothing."""
    return re.sub(r"\b([a-z_]+s)\.\d+\b", r"\1.{\1}", name)


def _without_numbers(names: Iterable[str]) -> frozenset[str]:
    """The names of weights, with 0 in place of each number, so that all layers have the same names.

    Biases do not count: a family's rules name one for nearly every weight.
    """
    return frozenset(re.sub(r"\{\w+\}|\b\d+\b", "0", name) for name in names if name.endswith(".weight"))


def _usual(family: Family, head: Head) -> list[tuple[CheckpointVariant, PretrainedConfig]]:
    """Usual configs: of the official class where ours takes its defaults, of the preset, and of that with experts."""
    official = {"architectures": [head.official]}
    chosen = {} if family.preset is None else dict(family.preset.settings)
    known = {name: each.default for name, each in axes(head.config_class).items()} | chosen
    settings = {name: value(known) if callable(value) else value for name, value in chosen.items()}
    settings["architectures"] = [head.ours]
    found = []
    for make in (
        lambda: family.settings.our_config(family.config_from(official, family.names.variant_of(official, None))),
        lambda: head.config_class(**settings),
        lambda: head.config_class(**settings, num_experts=2),
    ):
        with quiet(errors=True):
            try:
                config = make()
                found.append((family.names.variant_for(config), config))
            except Exception:  # nosec B112 # ours has no such model
                continue
    return found


def kin(names: Collection[str]) -> list[tuple[str, float]]:
    """Families with the share of the names that they have, the likeliest first; at least `NEAR`.

    Names of other towers do not count.
    """
    found = []
    towers = tuple(beginning for each in COMPOSITES.values() for beginning in each.towers)
    names = [name for name in names if not name.startswith(towers)]
    held = _without_numbers(names)
    for family in FAMILIES:
        patterns, usual = _patterns(family)
        places = Places([[pattern] for pattern in patterns])
        hits = sum(any(each[2].match(name) is not None for each in places.near(name)) for name in names)
        if names and hits >= NEAR * len(names):
            found.append((family, hits / len(names), -min(len(each - held) for each in usual)))
    found.sort(key=lambda each: (each[1], each[2]), reverse=True)
    return [(family, share) for family, share, lacking in found if (share, lacking) == found[0][1:]]


def all_known_beginnings() -> set[str]:
    """Names of one layer of every family, to find a prefix by where no config says the family."""
    filled = (pattern.fill(("0",) * len(pattern.fields)) for family in FAMILIES for pattern in _patterns(family)[0])
    return set(filled)
