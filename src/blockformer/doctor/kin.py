"""Which families a checkpoint without a config may be of, by the names of its tensors only."""

from collections.abc import Collection
from functools import cache

from blockformer.conversion.families.registry import FAMILIES
from blockformer.conversion.rules.patterns import Pattern, Places, tuple_of
from blockformer.files.quiet import quiet

NEAR = 0.9
"""The share of a checkpoint's names that a family must have, to be named."""


@cache
def _patterns(name: str) -> tuple[tuple[Pattern, ...], int]:
    """The names of a family's tensors, with placeholders, and how many of them every model of it has, without heads.

    They are the names of the official class and of its files, with all heads, for a usual config.
    """
    family = FAMILIES[name]
    names: dict[str, None] = {}
    of_body = 0
    for head in family.heads:
        with quiet(errors=True):
            try:
                variant = family.names.variant_of({"architectures": [head.official]}, None)
                config = family.settings.our_config(family.config_from({"architectures": [head.official]}, variant))
                rules = [*family.names.layout(variant, config).rules, *family.names.storage(variant, config)]
                spelled = family.names.spelled(variant)
            except Exception:  # nosec B112 # a head whose config has no defaults
                continue
        names |= dict.fromkeys(spelled.to_file(source) for rule in rules for source in tuple_of(rule.source))
        of_body = of_body or len(names)
    return tuple(Pattern(each) for each in names), of_body


def kin(names: Collection[str]) -> list[tuple[str, float]]:
    """Families with the share of the names that they have, the likeliest first; at least `NEAR`."""
    found = []
    for family in FAMILIES:
        patterns, of_body = _patterns(family)
        places = Places([[pattern] for pattern in patterns])
        hits, used = 0, set()
        for name in names:
            matching = [each for each in places.near(name) if each[2].match(name) is not None]
            hits += bool(matching)
            used |= {each[0] for each in matching}
        if names and hits >= NEAR * len(names):
            lacking = of_body - len([index for index in used if index < of_body])
            found.append((family, hits / len(names), -lacking))
    found.sort(key=lambda each: (each[1], each[2]), reverse=True)
    return [(family, share) for family, share, lacking in found if (share, lacking) == found[0][1:]]


def all_known_beginnings() -> set[str]:
    """Names of one layer of every family, to find a prefix by where no config says the family."""
    filled = (pattern.fill(("0",) * len(pattern.fields)) for family in FAMILIES for pattern in _patterns(family)[0])
    return set(filled)
