"""Two plans run one after the other, as one: file -> official class -> ours, and back.

What the first makes and the second reads is never stored. Where one of the two only renames, or the second undoes what
the first does, nothing is computed for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .groups import Group, Target
from .operations import Chain, Identity, Operation, Reversed, Shape, Steps, Transpose


@dataclass(frozen=True)
class InTurn:
    """Some groups, then others that read what they make.

    Attributes:
        sources: names of the tensors.
        first, second: the groups.
    """

    sources: tuple[str, ...]
    first: tuple[Group, ...]
    second: tuple[Group, ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        between = dict(zip(self.sources, tensors, strict=True))
        for group in self.first:
            between |= dict(group.apply(between.__getitem__))
            for name in {*group.sources} - {target.name for target in group.targets}:
                between.pop(name)
        return [tensor for group in self.second for _, tensor in group.apply(between.__getitem__)]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [target.shape for group in self.second for target in group.targets]


def in_turn(first: Iterable[Group], second: Iterable[Group]) -> list[Group]:
    """The groups that read what `first` reads, and write what `second` makes of it.

    They are in the order of `second`. What `first` does not make is read as it is.
    """
    makers = {target.name: group for group in first for target in group.targets}
    parts: list[tuple[list[Group], list[Group]]] = []
    part_of: dict[int, tuple[list[Group], list[Group]]] = {}  # id of a group of `first` -> the part that it is in
    for group in second:
        needed = list({id(makers[name]): makers[name] for name in group.sources if name in makers}.values())
        known = list({id(part): part for each in needed if (part := part_of.get(id(each)))}.values())
        part = known[0] if known else ([], [])
        if not known:
            parts.append(part)
        for other in known[1:]:
            part[0].extend(other[0])
            part[1].extend(other[1])
            parts.remove(other)
        part[0].extend(each for each in needed if id(each) not in part_of)
        part[1].append(group)
        part_of |= {id(each): part for each in part[0]}
    return [group for before, after in parts for group in _joined(before, after)]


def _joined(first: list[Group], second: list[Group]) -> list[Group]:
    """The groups that do these two in turn; usually one."""
    if all(group.is_copy for group in first):
        names = {group.targets[0].name: group.sources[0] for group in first}
        return [replace(each, sources=tuple(names.get(name, name) for name in each.sources)) for each in second]
    if len(first) == 1 and all(group.is_copy for group in second):
        by_source = {group.sources[0]: group.targets[0] for group in second}
        if list(by_source) == [target.name for target in first[0].targets]:
            return [replace(first[0], targets=tuple(by_source.values()))]
    if len(first) == len(second) == 1 and second[0].sources == tuple(target.name for target in first[0].targets):
        op = _simplified([*_steps(first[0].op), *_steps(second[0].op)])
        if isinstance(op, Identity) and len(first[0].sources) == len(second[0].targets):
            return [Group((name,), (to,), op) for name, to in zip(first[0].sources, second[0].targets, strict=True)]
        return [Group(first[0].sources, second[0].targets, op)]
    made = {target.name for group in first for target in group.targets}
    sources = [name for group in first for name in group.sources]
    sources += [name for group in second for name in group.sources if name not in made]
    unique = tuple(dict.fromkeys(sources))
    targets: list[Target] = [target for group in second for target in group.targets]
    return [Group(unique, tuple(targets), InTurn(unique, tuple(first), tuple(second)))]


def _steps(op: Operation) -> list[Operation]:
    """The operations of a chain in the order in which they run."""
    if isinstance(op, Steps):
        return [step for each in op.ops for step in _steps(each)]
    if isinstance(op, Reversed) and isinstance(op.op, Chain):
        return [step for each in reversed(op.op.ops) for step in _steps(Reversed(each))]
    if isinstance(op, Reversed) and isinstance(op.op, Reversed):
        return _steps(op.op.op)
    if isinstance(op, Identity) or (isinstance(op, Reversed) and isinstance(op.op, Identity)):
        return []
    return [op.op if isinstance(op, Reversed) and isinstance(op.op, Transpose) else op]


def _simplified(steps: Iterable[Operation]) -> Operation:
    """The operation of these steps, without any that undoes the step before it."""
    kept: list[Operation] = []
    for step in steps:
        if kept and _is_undone(kept[-1], step):
            kept.pop()
        else:
            kept.append(step)
    return kept[0] if len(kept) == 1 else Steps(*kept) if kept else Identity()


def _is_undone(first: Operation, second: Operation) -> bool:
    if isinstance(first, Transpose):
        return first == second
    pairs = ((first, second), (second, first))
    return any(isinstance(one, Reversed) and one.op == other for one, other in pairs)
