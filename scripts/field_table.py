"""Write docs/fields.md: every field of a config, what it takes, its default, its meaning and who sets it.

Usage: python scripts/field_table.py
"""

import functools
from pathlib import Path

import blockformer
from blockformer.model.axes import BLOCKS, GROUPS, axes, spelt

PAGE = Path(__file__).resolve().parent.parent / "docs" / "fields.md"
CONFIGS = {
    "decoder": blockformer.BlockformerDecoderConfig,
    "encoder": blockformer.BlockformerEncoderConfig,
    "encoder-decoder": blockformer.BlockformerEncoderDecoderConfig,
}
HEAD = """# Every field of a config

Written by `python scripts/field_table.py` from the fields' own declarations, which are the docstrings of the config
classes too. "Set by" names presets with another value than the default, at most four, and how many more. A field that
is not in every topology says which have it. [Families as settings](supported.md#families-as-settings) shows how fields
make up a family, and [from the figure to the code](from-figure-to-code.md) what a model computes by them.
"""
MOST = 4


@functools.cache
def settled() -> dict:
    """Each family's preset: its config and what it says itself; published sizes are left out."""
    families = blockformer.PRESETS.keys() - blockformer.presets.SIZES.keys()
    return {
        name: (blockformer.preset(name), settings)
        for name, (_, settings) in blockformer.PRESETS.items()
        if name in families
    }


def presets_that_set(name: str) -> str:
    """Names of presets whose value is not the default."""
    setters = [
        preset
        for preset, (config, settings) in settled().items()
        if name in settings and getattr(config, name) != axes(type(config))[name].default
    ]
    more = f" and {len(setters) - MOST} more" if len(setters) > MOST else ""
    return ", ".join(f"`{preset}`" for preset in setters[:MOST]) + more


def values_of(name: str, axis) -> str:
    """What a field takes, in words."""
    if isinstance(axis.values, str):
        own = ", also of [types of your own](own-block.md#a-layer-type-of-your-own)" * (name in BLOCKS)
        return axis.values + own + (", or None" if axis.optional and "None" not in axis.values else "")
    if len(axis.values) > 12:
        return "a name in transformers' `ACT2FN`" + (", or None" if axis.optional else "")
    takes_blocks = name in BLOCKS
    names = [f"`{value}`" for value in spelt(axis.values)] + ["[a block of your own](own-block.md)"] * takes_blocks
    return ", ".join(names) + (", or None" if axis.optional else "")


def written() -> str:
    """The whole page."""
    declared: dict = {}
    for config_class in CONFIGS.values():
        declared = {**axes(config_class), **declared}
    sections = [HEAD]
    for group in GROUPS:
        lines = []
        for name, axis in declared.items():
            if axis.group != group:
                continue
            owners = [kind for kind, config_class in CONFIGS.items() if name in axes(config_class)]
            where = "" if len(owners) == len(CONFIGS) else f" ({' and '.join(owners)})"
            cells = (
                f"`{name}`{where}",
                values_of(name, axis),
                f"`{axis.default!r}`",
                axis.meaning,
                presets_that_set(name),
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if lines:
            table = "| field | takes | default | meaning | set by |\n|---|---|---|---|---|\n" + "\n".join(lines)
            sections.append(f"## {group[0].upper()}{group[1:]}\n\n{table}\n")
    return "\n".join([*sections, combinations()])


def refused() -> tuple[dict[tuple[str, str], dict[str, str]], int]:
    """What each topology says to one change of its default config by a field with a closed list of values.

    Returns:
        Changes that some topology refuses, (field, value) -> topology -> its error, and how many were tried.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    tried = 0
    for kind, config_class in CONFIGS.items():
        for name, axis in axes(config_class).items():
            values = (True, False) if axis.values == "true or false" else axis.values
            if isinstance(values, str) or len(values) > 12:
                continue
            for value in values:
                if value == axis.default:
                    continue
                tried += 1
                try:
                    config_class(**{name: value})
                except ValueError as error:
                    found.setdefault((name, repr(value)), {})[kind] = str(error)
    return found, tried


def combinations() -> str:
    """The section on what is refused."""
    found, tried = refused()
    count = sum(len(errors) for errors in found.values())
    lines = []
    for (name, value), errors in found.items():
        has_field = {kind for kind, config_class in CONFIGS.items() if name in axes(config_class)}
        for error in dict.fromkeys(errors.values()):
            kinds = [kind for kind in errors if errors[kind] == error]
            where = "all" if set(kinds) == has_field else ", ".join(kinds)
            lines.append(f"| `{name}={value}` | {where} | {error} |")
    return (
        f"""## What is refused

Each value of the fields with a closed list was set on the default config of each topology: {tried} changes, of which
{count} were refused, with these errors.

| change | in | error |
|---|---|---|
"""
        + "\n".join(lines)
        + "\n"
    )


def main() -> None:
    PAGE.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
