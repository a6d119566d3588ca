"""Tensors under a trainer's own names: which missing ones they may be, and which ones the user says they are."""

import difflib
import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from blockformer.conversion.rules.operations import Shape
from blockformer.files.errors import ConversionError, shown
from blockformer.files.safetensors_io import HasHeader

from .finding import ERROR, Finding

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def asked_renames(asked: Sequence[str]) -> dict[str, str]:
    """`OLD=NEW` texts as a mapping.

    Raises:
        ConversionError: one is not of that form.
    """
    pairs = [each.partition("=") for each in asked]
    if wrong := [each for each, pair in zip(asked, pairs, strict=True) if not (pair[0] and pair[1])]:
        raise ConversionError(f"--rename must be like OLD=NEW, parts of tensor names, not {shown(wrong[0])}")
    return {old: new for old, _, new in pairs}


def asked_names(names: Collection[str], renames: Sequence[str], dropped: Sequence[str]) -> dict[str, str]:
    """New name -> name, renamed as asked, without those that are dropped; a dropped one may be a pattern with `*`.

    Raises:
        ConversionError: see `asked_renames` and `with_renames`; or no tensor has a name that is dropped.
    """
    found = with_renames(names, asked_renames(renames))
    for name in dropped:
        fitting = fnmatch.filter(found, name) if "*" in name else [name] if name in found else []
        if not fitting:
            near = difflib.get_close_matches(name, found, n=1)
            raise ConversionError(f"--drop {name}: no such tensor{f'; did you mean {near[0]}?' if near else ''}")
        for each in fitting:
            del found[each]
    return found


def with_renames(names: Collection[str], asked: Mapping[str, str]) -> dict[str, str]:
    """New name -> name: OLD, as whole parts of a name between dots, replaced by NEW.

    Raises:
        ConversionError: an OLD is in no name, or two names become the same.
    """
    found: dict[str, str] = {}
    used = set()
    for name in names:
        new = f".{name}."
        for old, other in asked.items():
            if f".{old}." in new:
                used.add(old)
                new = new.replace(f".{old}.", f".{other}." if other else ".")
        new = new.strip(".")
        if new in found:
            raise ConversionError(f"--rename makes {shown(new)} of {shown(name)} and of {shown(found[new])}")
        found[new] = name
    if unused := [old for old in asked if old not in used]:
        near = difflib.get_close_matches(unused[0], {part for name in names for part in name.split(".")}, n=1)
        hint = f"; did you mean {shown(near[0])}?" if near else ""
        raise ConversionError(f"--rename {unused[0]}={asked[unused[0]]}: no tensor has this in its name{hint}")
    return found


def suggestions(unknown: Mapping[str, HasHeader], missing: Mapping[str, Shape]) -> list[Finding]:
    """What unknown tensors may be: missing ones of the same shapes, in the same layers.

    Two names may be one tensor only by their shapes; whether they are is for the user to say.
    """
    here = _patterns({name: tuple(header.shape) for name, header in unknown.items()})
    lacking = _patterns(missing)
    findings = []
    for pattern, shapes in here.items():
        fitting = [each for each, others in lacking.items() if others == shapes]
        if not fitting:
            continue
        near = difflib.get_close_matches(pattern, fitting, n=3, cutoff=0.0)
        said = f"{shown(pattern)} is not a name of the model; of the same shape, {' and '.join(map(shown, near))} "
        options = [f"--rename {'='.join(_differing_parts(pattern, each))}" for each in near]
        names = tuple(name for name in unknown if NUMBER.sub("{n}", name) == pattern)
        fix = f"say which it is: {' or '.join(options)}"
        findings.append(Finding("renamed", ERROR, f"{said}{'are' if near[1:] else 'is'} missing", fix, names=names))
    return findings


def _patterns(shapes: Mapping[str, Shape]) -> dict[str, frozenset[tuple[tuple[str, ...], Shape]]]:
    """Name with {n} for each number -> the numbers and shapes that there are."""
    found: dict[str, set[tuple[tuple[str, ...], Shape]]] = defaultdict(set)
    for name, shape in shapes.items():
        found[NUMBER.sub("{n}", name)].add((tuple(NUMBER.findall(name)), tuple(shape)))
    return {pattern: frozenset(places) for pattern, places in found.items()}


def _differing_parts(name: str, other: str) -> tuple[str, str]:
    """The parts in which two names differ, without what they begin and end with alike."""
    one, two = name.split("."), other.split(".")
    while one and two and one[0] == two[0]:
        one, two = one[1:], two[1:]
    while len(one) > 1 and len(two) > 1 and one[-1] == two[-1]:
        one, two = one[:-1], two[:-1]
    return ".".join(one) or name, ".".join(two)
