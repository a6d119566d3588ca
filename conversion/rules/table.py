"""The conversion engine: one table of rules, planned from only the headers, run group by group, reversed by code.

A rule says which tensors of the official layout make which of our tensors, and through which operation. Names may
hold numbered placeholders: `model.layers.{layer}.mlp.up_proj.weight` stands for every layer.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from blockformer.files.errors import ConversionError, MisfitError, shown
from blockformer.files.safetensors_io import HasHeader

from .groups import (
    LACKING,
    NO_PLACE,
    TWICE,
    UNTAKEN,
    Group,
    compare,
    group_of,
    lacking,
    told,
    with_rest,
    wrong_shapes,
)
from .operations import Identity, Operation, Shape, way_back
from .patterns import Pattern, Places, nothing_matched, tuple_of


@dataclass(frozen=True)
class _Header:
    shape: Shape
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Rule:
    """Official tensors `source` <-> our tensors `target`, through `op`.

    Args:
        source: one name or several, with placeholders such as `{layer}` that stand for one number each.
        target: one name or several, with the same placeholders.
        op: how `source` becomes `target`; a table that is reversed needs the way back of each.
        dtypes: what the sources must be, one for each; they are never cast. Otherwise only floating-point tensors are
            taken, and the plan's `dtype` is applied to them.
        target_dtype: the dtype of what sources with `dtypes` become; None: their own.
    """

    source: str | tuple[str, ...]
    target: str | tuple[str, ...]
    op: Operation = field(default_factory=Identity)
    dtypes: tuple[torch.dtype, ...] | None = None
    target_dtype: torch.dtype | None = None

    def under(self, theirs: str, ours: str) -> "Rule":
        """The rule with a prefix before its official names and one before ours."""
        return replace(self, source=_prefixed(theirs, self.source), target=_prefixed(ours, self.target))


def _prefixed(prefix: str, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return prefix + names if isinstance(names, str) else tuple(prefix + name for name in names)


def _patterns(names: str | tuple[str, ...]) -> list[Pattern]:
    return [Pattern(name) for name in tuple_of(names)]


UNCHANGED = Identity()


def module_rules(modules: Mapping[str, str | tuple[str, ...]], op: Operation = UNCHANGED) -> list[Rule]:
    """Rules for the weight and the bias of modules: official name -> ours, or several of ours, made by `op`."""

    def named(ours: str | tuple[str, ...], kind: str) -> str | tuple[str, ...]:
        return f"{ours}.{kind}" if isinstance(ours, str) else tuple(f"{name}.{kind}" for name in ours)

    pairs = ((theirs, ours, kind) for theirs, ours in modules.items() for kind in ("weight", "bias"))
    return [Rule(f"{theirs}.{kind}", named(ours, kind), op) for theirs, ours, kind in pairs]


class RuleTable:
    """The rules of one family.

    Args:
        rules: each one is used in both directions.
        ignored: names (with placeholders) of official tensors that are left out deliberately. One that ends in `*`
            stands for all names that begin so: layers that are published with a model and part of none here.
        layers: how many layers the model has: `{layer}` stands for a number below that, `{beyond}` for one from there
            on. None for no bound.

    Raises:
        ValueError: the names of one rule do not all have the same placeholders.
    """

    def __init__(self, rules: Iterable[Rule], ignored: Iterable[str] = (), layers: int | None = None):
        self.rules = tuple(rules)
        self.layers, self.ignored = layers, tuple(ignored)
        self._ignored = [Pattern(name.removesuffix("*"), name.endswith("*")) for name in self.ignored]
        self._sides = [(_patterns(rule.source), _patterns(rule.target)) for rule in self.rules]
        for rule, (sources, targets) in zip(self.rules, self._sides, strict=True):
            if len({tuple(pattern.fields) for pattern in sources + targets}) != 1:
                raise ValueError(f"the names of {rule} must all have the same placeholders")

    def plan(
        self,
        tensors: Mapping[str, HasHeader],
        expected: Mapping[str, Sequence[int]] | None = None,
        *,
        reverse: bool = False,
        optional: Collection[str] = (),
        dtype: torch.dtype | None = None,
        rest: bool = False,
    ) -> list[Group]:
        """The groups that convert `tensors`, in the order of their first tensor, from only the headers.

        Args:
            tensors: name -> header of every tensor of the checkpoint (`Checkpoint.tensors`).
            expected: name -> shape of every tensor that the target model has; None skips these checks.
            reverse: from our layout to the official one.
            optional: names (with placeholders) in `expected` that may stay unfilled: tied ones.
            dtype: cast floating-point tensors to this; None keeps each tensor's own.
            rest: copy the tensors that no rule takes, of any dtype, under their names.

        Raises:
            ConversionError: one error that lists every problem: tensors that no rule or several rules take, missing
                parts of a group, targets filled twice or not at all or unknown to the model, wrong shapes, a dtype
                that is not floating-point. If no name matches at all, it says what the names look like instead.
        """
        sides = [side[::-1] if reverse else side for side in self._sides]
        ops = [way_back(rule.op) if reverse else rule.op for rule in self.rules]
        problems: dict[str, list[str]] = defaultdict(list)
        found = self._take(tensors, sides, [] if reverse else self._ignored, problems)
        if rest:
            problems.pop(UNTAKEN, None)
            problems.pop(NO_PLACE, None)
        elif not found:
            raise ConversionError(nothing_matched(tensors, [sources for sources, _ in sides]))
        filled: dict[str, str] = {}
        groups = []
        for (index, values), parts in found.items():
            rule, (sources, targets) = self.rules[index], sides[index]
            names = tuple(pattern.fill(values) for pattern in targets)
            for name in names:
                if name in filled:
                    twice = shown(next(iter(parts.values())))
                    problems[TWICE].append(f"{shown(name)}: from {filled[name]} and {twice}")
                filled[name] = shown(next(iter(parts.values())))
            absent = [pattern.fill(values) for slot, pattern in enumerate(sources) if slot not in parts]
            if absent:
                problems[LACKING].append(lacking(parts.values(), absent))
                continue
            read = [parts[slot] for slot in range(len(sources))]
            group = group_of(ops[index], read, names, tensors, problems, rule.dtypes, rule.target_dtype, dtype)
            if group is not None:
                groups.append(group)
        if rest:
            groups = with_rest(groups, {name for parts in found.values() for name in parts.values()}, tensors, filled)
        if expected is not None:
            compare(filled, groups, expected, [Pattern(name) for name in optional], problems)
        if problems:
            raise MisfitError(told(problems), wrong_shapes(groups, expected or {}))
        return groups

    @property
    def has_further_layers(self) -> bool:
        """Whether checkpoints may hold layers that are part of no model here."""
        return any(pattern.is_open for pattern in self._ignored)

    def makes(self, name: str) -> bool:
        """Whether one of the rules has a tensor of ours of this name."""
        return any(pattern.match(name) is not None for _, targets in self._sides for pattern in targets)

    def further_layers(self, names: Iterable[str]) -> list[str]:
        """The tensors, out of some, that belong to such layers."""
        return [name for name in names if self._ignores(name, [each for each in self._ignored if each.is_open])]

    def shapes_before(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The official tensors that would make ours of these shapes: name -> shape.

        Tensors that no rule makes, or that do not belong together, are passed over.
        """
        sides, ops = [side[::-1] for side in self._sides], [way_back(rule.op) for rule in self.rules]
        found = self._take({name: _Header(shape) for name, shape in shapes.items()}, sides, [], defaultdict(list))
        before: dict[str, Shape] = {}
        for (index, values), parts in found.items():
            ours, theirs = sides[index]
            if len(parts) == len(ours):
                with suppress(ConversionError):
                    made = ops[index].forward_shapes([tuple(shapes[parts[slot]]) for slot in range(len(ours))])
                    before |= {pattern.fill(values): shape for pattern, shape in zip(theirs, made, strict=True)}
        return before

    def _take(
        self,
        tensors: Mapping[str, HasHeader],
        sides: list[tuple[list[Pattern], list[Pattern]]],
        ignored: list[Pattern],
        problems: dict[str, list[str]],
    ) -> dict[tuple[int, tuple[str, ...]], dict[int, str]]:
        """(rule, numbers) -> place among the rule's sources -> name."""
        found: dict[tuple[int, tuple[str, ...]], dict[int, str]] = {}
        places = Places([sources for sources, _ in sides])
        for name in tensors:
            near = [
                (index, values, slot, pattern)
                for index, slot, pattern in places.near(name)
                if (values := pattern.match(name)) is not None
            ]
            takers = [each[:3] for each in near if self._is_there(each[3], each[1])]
            if len(takers) > 1:
                rules = ", ".join(sides[index][0][slot].text for index, _, slot in takers)
                problems["tensors that several rules take"].append(f"{shown(name)}: {rules}")
            elif not takers and not self._ignores(name, ignored):
                if near:
                    problems[NO_PLACE].append(
                        f"{shown(name)}: the model has {self.layers} layer{'s' * (self.layers != 1)}"
                    )
                else:
                    problems[UNTAKEN].append(shown(name))
            for index, values, slot in takers:
                found.setdefault((index, values), {})[slot] = name
        return found

    def _ignores(self, name: str, ignored: Iterable[Pattern]) -> bool:
        found = ((pattern, pattern.match(name)) for pattern in ignored)
        return any(values is not None and self._is_there(pattern, values) for pattern, values in found)

    def _is_there(self, pattern: Pattern, values: tuple[str, ...]) -> bool:
        """Whether the numbers of a matching name are on their side of the bound."""
        if self.layers is None:
            return True
        numbers = dict(zip(pattern.fields, map(int, values), strict=True))
        return numbers.get("layer", 0) < self.layers <= numbers.get("beyond", self.layers)
