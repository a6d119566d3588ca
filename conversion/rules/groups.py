"""The pieces of a conversion: tensors that are read together, and what they become; and what is wrong with a plan."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, MisfitError, listed, shown
from blockformer.files.safetensors_io import HasHeader

from .operations import Identity, Operation, Reversed, Shape
from .patterns import Pattern

UNTAKEN, TWICE = "tensors that no rule takes", "targets filled twice"
LACKING = "parts that are missing"
NO_PLACE = "tensors that the model has no place for"
CAN_GO = "If the official class does not read them either, remove them from the file."


@dataclass(frozen=True)
class Target:
    """The header of a tensor that a group will make."""

    name: str
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Group:
    """The smallest piece of a conversion: the tensors `sources`, read together, make the tensors `targets`.

    Attributes:
        sources: names to read.
        targets: what they become, in order.
        op: the operation, its `forward` in the direction of the plan.
    """

    sources: tuple[str, ...]
    targets: tuple[Target, ...]
    op: Operation

    @property
    def is_copy(self) -> bool:
        """Whether it copies one tensor unchanged, so that this need not be in memory as a whole."""
        op = self.op.op if isinstance(self.op, Reversed) else self.op
        return isinstance(op, Identity) and len(self.sources) == len(self.targets) == 1

    def renamed(self, name_of: Callable[[str], str]) -> "Group":
        """The same group, whose targets have other names."""
        return replace(self, targets=tuple(replace(each, name=name_of(each.name)) for each in self.targets))

    def apply(self, read: Callable[[str], Tensor]) -> list[tuple[str, Tensor]]:
        """Read the sources and return the targets, with names, order, dtypes and shapes as planned.

        Args:
            read: name -> tensor (`Checkpoint.read`, or a state dict's `__getitem__`).
        """
        made = self.made(read)
        return [(target.name, tensor.to(target.dtype)) for target, tensor in zip(self.targets, made, strict=True)]

    def made(self, read: Callable[[str], Tensor]) -> list[Tensor]:
        """The same, before the cast to the planned dtypes."""
        tensors = self.op.forward([read(name) for name in self.sources])
        for target, tensor in zip(self.targets, tensors, strict=True):
            if tuple(tensor.shape) != target.shape:
                raise ConversionError(
                    f"{shown(target.name)} is {list(tensor.shape)}, not {list(target.shape)} as planned"
                )
        return tensors

    def parts(self, name: str, checkpoint: Checkpoint) -> Iterator[Tensor]:
        """The elements of the target of this name, in order and flat; a copy is never in memory as a whole."""
        if not self.is_copy:
            return iter([dict(self.apply(checkpoint.read))[name].reshape(-1)])
        return (part.to(self.targets[0].dtype) for part in checkpoint.parts(self.sources[0]))


def copy_of(name: str, header: HasHeader) -> Group:
    """The group that copies a tensor."""
    return Group((name,), (Target(name, header.dtype, tuple(header.shape)),), Identity())


def targets_of(groups: Iterable[Group]) -> dict[str, Target]:
    """Name -> header, of all tensors that groups make."""
    return {target.name: target for group in groups for target in group.targets}


def groups_of(
    weights: Mapping[str, Sequence[str]],
    op: Operation,
    dtypes: Sequence[torch.dtype],
    dtype: torch.dtype,
    tensors: Mapping[str, HasHeader],
) -> list[Group]:
    """The groups that make weights of their parts, by names without placeholders.

    Args:
        weights: name -> the names of its parts.
        op: makes it of them.
        dtypes: what the parts must be.
        dtype: of the weight.
        tensors: name -> header of every tensor of the checkpoint.

    Raises:
        ConversionError: one error that lists every problem; see `table.RuleTable.plan`.
    """
    problems: dict[str, list[str]] = defaultdict(list)
    groups = []
    for weight, parts in weights.items():
        if absent := [name for name in parts if name not in tensors]:
            problems[LACKING].append(lacking([name for name in parts if name in tensors], absent))
            continue
        if weight in tensors:
            problems[TWICE].append(shown(weight))
        group = group_of(op, list(parts), (weight,), tensors, problems, dtypes, dtype)
        groups += [] if group is None else [group]
    if problems:
        raise MisfitError(told(problems))
    return groups


def lacking(have: Iterable[str], lack: Iterable[str]) -> str:
    """The line on a weight that has only some of its parts."""
    return f"{', '.join(map(shown, have))}: needs {', '.join(map(shown, lack))}"


def told(problems: Mapping[str, list[str]]) -> str:
    """The message that lists all problems."""
    kinds = (f"\n{kind} ({len(lines)}):{listed(lines)}" for kind, lines in problems.items())
    end = f"\n{CAN_GO}" if UNTAKEN in problems else ""
    return "the checkpoint's tensors do not fit the model:" + "".join(kinds) + end


def with_rest(
    groups: list[Group], taken: Collection[str], tensors: Mapping[str, HasHeader], filled: Collection[str]
) -> list[Group]:
    """The groups and copies of all other tensors, in the order of the tensors.

    Raises:
        ConversionError: a group makes a tensor of that name.
    """
    twice = [name for name in tensors if name in filled and name not in taken]
    if twice:
        raise ConversionError(
            f"the checkpoint's tensors do not fit the model:\n{TWICE} ({len(twice)}):{listed(map(shown, twice))}"
        )
    readers = {name: group for group in groups for name in group.sources}
    ordered: dict[int, Group] = {}
    for name, header in tensors.items():
        if name not in taken:
            copy = copy_of(name, header)
            ordered[id(copy)] = copy
        elif name in readers:  # else a part of its group is missing
            ordered[id(readers[name])] = readers[name]
    return list(ordered.values())


def group_of(
    op: Operation,
    sources: list[str],
    names: tuple[str, ...],
    tensors: Mapping[str, HasHeader],
    problems: dict[str, list[str]],
    wanted: Sequence[torch.dtype] | None = None,
    target_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> Group | None:
    """The group of these sources, or None after noting what is wrong with them.

    Args:
        op: makes targets of these `names` of the sources.
        tensors: name -> header of every tensor.
        problems: kind -> lines, to be completed.
        wanted, target_dtype: see `table.Rule`, where `wanted` is called `dtypes`.
        dtype: of the targets; None leaves theirs.
    """
    dtypes = [tensors[name].dtype for name in sources]
    if wanted is not None:
        wrong = [
            f"{shown(name)} is {own}, not {other}"
            for name, own, other in zip(sources, dtypes, wanted, strict=True)
            if own is not other
        ]
        if wrong:
            problems["tensors of another dtype"] += wrong
            return None
        target_dtype = dtypes[0] if target_dtype is None else dtype or target_dtype
    else:
        whole = [name for name in sources if not tensors[name].dtype.is_floating_point]
        if whole:
            lines = [f"{shown(name)} is {tensors[name].dtype}" for name in whole]
            problems["tensors that must be floating-point"] += lines
            return None
        if len(set(dtypes)) > 1:
            problems["parts of different dtypes"].append(", ".join(f"{shown(n)} {tensors[n].dtype}" for n in sources))
            return None
        target_dtype = dtype or dtypes[0]
    try:
        shapes = op.forward_shapes([tuple(tensors[name].shape) for name in sources])
        targets = tuple(Target(name, target_dtype, tuple(shape)) for name, shape in zip(names, shapes, strict=True))
    except ValueError as error:
        problems["wrong shapes"].append(f"{', '.join(map(shown, sources))}: {error}")
        return None
    return Group(tuple(sources), targets, op)


def wrong_shapes(groups: Iterable[Group], expected: Mapping[str, Sequence[int]]) -> list[tuple[Shape, Shape]]:
    """The shapes of tensors, and the shapes that the model expects."""
    targets = targets_of(groups).values()
    pairs = [(target.shape, tuple(expected.get(target.name, target.shape))) for target in targets]
    return [(have, want) for have, want in pairs if have != want]


def compare(
    filled: Collection[str],
    groups: list[Group],
    expected: Mapping[str, Sequence[int]],
    optional: list[Pattern],
    problems: dict[str, list[str]],
) -> None:
    """Note where the plan differs from what the model expects."""
    for group in groups:
        origin = ", ".join(map(shown, group.sources))
        for target in group.targets:
            if target.name not in expected:
                problems[NO_PLACE].append(f"{shown(target.name)} (from {origin})")
            elif target.shape != tuple(expected[target.name]):
                want = list(expected[target.name])
                problems["wrong shapes"].append(f"{shown(target.name)} is {list(target.shape)}, the model's is {want}")
    for name in expected:
        if name not in filled and not any(pattern.match(name) is not None for pattern in optional):
            problems["tensors of the model that nothing fills"].append(shown(name))
