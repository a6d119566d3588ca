"""Matrices that were joined into one, where the released layout has them one by one, as inference engines train them.

The shape of a joined matrix does not show which rows are whose. An option says it; it is never guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockformer.conversion.rules.groups import Group, Target
from blockformer.conversion.rules.operations import Shape, Split
from blockformer.files.errors import shown
from blockformer.files.safetensors_io import HasHeader

from .finding import ERROR, Finding

QKV = ("stacked", "by-head")
"""All queries, then all keys, then all values; or the three of each key head side by side, as in Megatron-LM."""
GATE_UP = ("gate-first", "up-first")


@dataclass
class Joined:
    """What splitting gives.

    Attributes:
        groups: what makes the parts.
        findings: what is joined, and what must be said to split it.
        joined: names that are split, or would be.
        filled: released names that they have inside.
    """

    groups: list[Group] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)


def split_joined(
    unknown: Mapping[str, HasHeader],
    missing: Mapping[str, Shape],
    key_value_heads: int | None,
    qkv: str | None,
    gate_up: str | None,
) -> Joined:
    """Find matrices that hold several missing ones, and split them as the options say.

    Args:
        unknown: name -> header of tensors that no layout has.
        missing: name -> shape of the released tensors that nothing fills, in the model's order.
        key_value_heads: of the model.
        qkv: one of `QKV`, or None if it is not said.
        gate_up: one of `GATE_UP`, or None.
    """
    found = Joined()
    asked: dict[str, list[str]] = {"qkv": [], "gate_up": []}
    for name, header in unknown.items():
        parts = _parts_of(name, tuple(header.shape), missing)
        if parts is None:
            continue
        kind = "qkv" if len(parts) == 3 else "gate_up"
        asked[kind].append(name)
        found.joined.append(name)
        found.filled += parts
        how = qkv if kind == "qkv" else gate_up
        if how is not None:
            order = parts[::-1] if how == "up-first" else parts
            groups = (key_value_heads or 1) if how == "by-head" else 1
            op = Split(0, tuple(missing[part][0] for part in order), groups)
            targets = tuple(Target(part, header.dtype, missing[part]) for part in order)
            found.groups.append(Group((name,), targets, op))
    for kind, names in asked.items():
        if names:
            how = qkv if kind == "qkv" else gate_up
            found.findings.append(_finding(kind, names, how))
    return found


def _finding(kind: str, names: list[str], how: str | None) -> Finding:
    words = {"qkv": "queries, keys and values", "gate_up": "gate and up projections"}[kind]
    said = f"{words} are one matrix in {len(names)} tensors ({shown(names[0])}); the released layout has them apart"
    option = {"qkv": f"--qkv {' or --qkv '.join(QKV)}", "gate_up": f"--gate-up {' or --gate-up '.join(GATE_UP)}"}[kind]
    fix = f"split as {how}" if how else f"its shape does not show the order of the rows; say it with {option}"
    return Finding("fused", ERROR, said, fix, how is not None, tuple(names[:3]))


def _parts_of(name: str, shape: Shape, missing: Mapping[str, Shape]) -> list[str] | None:
    """The missing tensors next to one that it has exactly the rows of: three of an attention, or two of a network."""
    module, _, kind = name.rpartition(".")
    place = module.rpartition(".")[0]
    siblings = [
        other
        for other, its in missing.items()
        if other.rpartition(".")[2] == kind
        and other.rpartition(".")[0].rpartition(".")[0] == place
        and its[1:] == shape[1:]
        and len(its) == len(shape)
    ]
    rows = sum(missing[other][0] for other in siblings if missing[other])
    return siblings if len(siblings) in (2, 3) and shape and rows == shape[0] else None
