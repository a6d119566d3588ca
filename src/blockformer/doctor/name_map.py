"""Weights of code that nobody knows, made a family's by a file of names that their owner writes.

    {
      "config": {"model_type": "llama", "hidden_size": 64, ...},
      "tensors": [
        ["tok.weight", "model.embed_tokens.weight"],
        ["blocks.{layer}.qkv.weight", ["...q_proj.weight", "...k_proj.weight", "...v_proj.weight"], "split"],
        [[], "model.layers.{layer}.mlp.down_proj.bias", {"constant": 0}]
      ],
      "drop": ["blocks.{layer}.mask"]
    }

An entry has the names in the file, the names that the family's released checkpoints have, and the operations between
them. A placeholder such as `{layer}` stands for a number; one that only one side has stands for all of its numbers, as
experts do that are stacked. Nothing is taken by its place or its shape: what no entry names is an error.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from blockformer.conversion.rules.groups import LACKING, TWICE, UNTAKEN, Group, Target, compare, group_of, lacking
from blockformer.conversion.rules.operations import Shape
from blockformer.conversion.rules.patterns import Pattern
from blockformer.files.errors import ConversionError, MisfitError, listed, shown
from blockformer.files.json_files import read_json
from blockformer.files.safetensors_io import HasHeader

from .map_operations import steps_of, word_of, words_in

KEYS = ("config", "tensors", "drop")
QUESTION = "?"
"""Begins a text in which a draft asks for what shapes and names do not tell."""
MALFORMED = "entries that are not [FROM, TO, OPERATION ...]"
NO_ENTRY = UNTAKEN.replace("rule", "entry")
SEVERAL = "tensors that several entries take"
FOREIGN = "names that the family's model does not have"
UNUSED = "entries whose tensors are not there"
Numbers = tuple[tuple[str, str], ...]
"""(placeholder, number) for each placeholder that both sides of an entry have."""


@dataclass(frozen=True)
class Entry:
    """A line of the file: names with placeholders, and the operations between them."""

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    asked: tuple[Any, ...]

    @property
    def shared(self) -> frozenset[str]:
        """The placeholders on both sides; on the targets only, if the entry has no sources."""
        sides = [{name for each in side for name in each.fields} for side in (self.sources, self.targets)]
        return frozenset(sides[0] & sides[1]) if self.sources else frozenset(sides[1])

    @property
    def title(self) -> str:
        """What an error calls it."""
        return shown(self.sources[0].text if self.sources else self.targets[0].text)


@dataclass
class Instance:
    """An entry for one layer: names by their place in the entry, in the order of the numbers of other placeholders."""

    sources: list[dict[tuple[int, ...], str]]
    targets: list[dict[tuple[int, ...], str]]


@dataclass(frozen=True)
class NameMap:
    """A file of names.

    Args:
        path: the JSON file.
        config: the fields of the family's `config.json`.
        entries: of `tensors`.
        dropped: names of what the model does without.
        problems: what is wrong with the file by itself.
    """

    path: str
    config: dict[str, Any]
    entries: tuple[Entry, ...]
    dropped: tuple[Pattern, ...]
    problems: dict[str, list[str]] = field(default_factory=dict)

    @property
    def beginnings(self) -> set[str]:
        """Names of the first layer, by which a wrapper's prefix is found."""
        return {each.fill(("0",) * len(each.fields)) for entry in self.entries for each in entry.sources}

    def groups(
        self,
        tensors: Mapping[str, HasHeader],
        released: Mapping[str, Shape],
        optional: Iterable[str],
        config: PretrainedConfig | None,
        refused: str | None = None,
    ) -> list[Group]:
        """The groups that make the family's released tensors.

        Args:
            tensors: name -> header of those in the file.
            released: name -> shape that the family's model has; {} if its config is refused.
            optional: released names that may be missing.
            config: of the family's model; None if it is refused.
            refused: why it is.

        Raises:
            MisfitError: one error that lists every problem.
        """
        problems = defaultdict(list, {kind: [*lines] for kind, lines in self.problems.items()})
        if refused is not None:
            problems["the config of the family's model"].append(refused)
        instances = self._instances(tensors, released, problems)
        groups: list[Group] = []
        filled: dict[str, str] = {}
        usual = Counter(header.dtype for header in tensors.values() if header.dtype.is_floating_point).most_common(1)
        dtype = usual[0][0] if usual else torch.float32
        for entry, instance in instances:
            targets = _in_order(instance.targets)
            for name in targets:
                if name in filled:
                    problems[TWICE].append(f"{shown(name)}: by {filled[name]} and by {entry.title}")
                filled[name] = entry.title
            if config is not None:
                groups += self._group(entry, instance, tensors, released, config, dtype, problems)
        if config is not None:
            compare(filled, groups, released, [Pattern(name) for name in optional], problems)
        if any(problems.values()):
            kinds = "".join(f"\n{kind} ({len(each)}):{listed(each)}" for kind, each in problems.items() if each)
            raise MisfitError(f"{self.path} does not make a whole model of the tensors:{kinds}")
        return groups

    def _group(
        self,
        entry: Entry,
        instance: Instance,
        tensors: Mapping[str, HasHeader],
        released: Mapping[str, Shape],
        config: PretrainedConfig,
        dtype: torch.dtype,
        problems: dict[str, list[str]],
    ) -> list[Group]:
        sources, targets = _in_order(instance.sources), tuple(_in_order(instance.targets))
        empty = [each.text for each, names in zip(entry.targets, instance.targets, strict=True) if not names]
        if unknown := [*empty, *(name for name in targets if name not in released)]:
            lines = (f"{shown(name)} (from {entry.title})" for name in unknown)
            problems[FOREIGN] += lines
            return []
        wanted = [tuple(released[name]) for name in targets]
        try:
            op = steps_of(entry.asked, [tuple(tensors[name].shape) for name in sources], wanted, config)
        except ConversionError as error:
            problems["operations that do not apply"].append(f"{shown(sources[0]) if sources else entry.title}: {error}")
            return []
        if not sources:
            return [Group((), tuple(map(Target, targets, [dtype] * len(targets), wanted)), op)]
        group = group_of(op, sources, targets, tensors, problems)
        return [] if group is None else [group]

    def _instances(
        self, tensors: Mapping[str, HasHeader], released: Mapping[str, Shape], problems: dict[str, list[str]]
    ) -> list[tuple[Entry, Instance]]:
        """Each entry for each layer that it is there for."""
        found = self._taken(tensors, problems)
        self._add_free(found, released, problems)
        made = []
        for (index, numbers), instance in found.items():
            entry = self.entries[index]
            absent = [each.text for each, names in zip(entry.sources, instance.sources, strict=True) if not names]
            if absent:
                have = (name for names in instance.sources for name in names.values())
                problems[LACKING].append(lacking(have, [_filled(text, numbers) for text in absent]))
                continue
            self._name_targets(entry, instance, numbers, released)
            made.append((entry, instance))
        return made

    def _taken(
        self, tensors: Mapping[str, HasHeader], problems: dict[str, list[str]]
    ) -> dict[tuple[int, Numbers], Instance]:
        """The tensors by the entries that take them."""
        found: dict[tuple[int, Numbers], Instance] = {}
        for name in tensors:
            takers = _matches(name, ((index, entry.sources) for index, entry in enumerate(self.entries)))
            is_dropped = any(pattern.match(name) is not None for pattern in self.dropped)
            if len(takers) + is_dropped > 1:
                texts = [self.entries[index].sources[slot].text for index, slot, _ in takers]
                problems[SEVERAL].append(f"{shown(name)}: {', '.join(texts + ['drop'] * is_dropped)}")
            elif not takers and not is_dropped:
                problems[NO_ENTRY].append(shown(name))
            for index, slot, numbers in takers:
                self._put(found, index, slot, numbers, name)
        used = {index for index, _ in found}
        lost = [entry for index, entry in enumerate(self.entries) if entry.sources and index not in used]
        problems[UNUSED] += [", ".join(shown(each.text) for each in entry.sources) for entry in lost]
        unused = (each for each in self.dropped if not any(each.match(name) is not None for name in tensors))
        problems[UNUSED] += [f"drop {shown(each.text)}" for each in unused]
        return found

    def _add_free(
        self, found: dict[tuple[int, Numbers], Instance], released: Mapping[str, Shape], problems: dict[str, list[str]]
    ) -> None:
        """Add the entries that make tensors of none, for each layer that the model has."""
        free = {index: entry for index, entry in enumerate(self.entries) if not entry.sources}
        for name in released:
            for index, _, numbers in _matches(name, ((index, entry.targets) for index, entry in free.items())):
                found.setdefault((index, _of(numbers, free[index].shared)), _empty(free[index]))
        used = {index for index, _ in found}
        problems[FOREIGN] += [entry.title for index, entry in free.items() if released and index not in used]

    def _put(self, found: dict, index: int, slot: int, numbers: Numbers, name: str) -> None:
        entry = self.entries[index]
        instance = found.setdefault((index, _of(numbers, entry.shared)), _empty(entry))
        rest = tuple(int(number) for place, number in numbers if place not in entry.shared)
        instance.sources[slot][rest] = name

    def _name_targets(self, entry: Entry, instance: Instance, numbers: Numbers, released: Mapping[str, Shape]) -> None:
        """The names that an instance makes; of a placeholder that only they have, all that the model has."""
        for slot, pattern in enumerate(entry.targets):
            text = _filled(pattern.text, numbers)
            inner = Pattern(text)
            if not inner.fields:
                instance.targets[slot][()] = text
                continue
            for name in released:
                if (values := inner.match(name)) is not None:
                    instance.targets[slot][tuple(map(int, values))] = name


def read_map(path: str | PathLike[str]) -> NameMap:
    """Read a file of names.

    Raises:
        ConversionError: it is not JSON, has no list of tensors, or has questions that nobody has answered.
    """
    content = read_json(path)
    if asked := [*_questions(content, "")]:
        raise ConversionError(
            f"{path}: {len(asked)} questions of the draft are open; put the answer in place of each text that begins "
            f"with {QUESTION}:{listed(asked)}"
        )
    if unknown := [name for name in content if name not in KEYS]:
        raise ConversionError(f"{path}: unknown {shown(unknown[0])}; there are {', '.join(KEYS)}")
    config, entries, dropped = content.get("config", {}), content.get("tensors"), content.get("drop", [])
    if not isinstance(config, dict):
        raise ConversionError(f"{path}: config must be an object, the fields of the family's config.json")
    if not isinstance(entries, list) or not entries:
        raise ConversionError(f"{path}: tensors must be a list of [FROM, TO, OPERATION ...]")
    if not isinstance(dropped, list) or not all(isinstance(each, str) for each in dropped):
        raise ConversionError(f"{path}: drop must be a list of names")
    problems: dict[str, list[str]] = defaultdict(list)
    found = [_entry(each, problems) for each in entries]
    return NameMap(str(path), config, tuple(filter(None, found)), tuple(map(Pattern, dropped)), dict(problems))


def is_map(path: Path) -> bool:
    """Whether a file is one of names, or a draft of one."""
    try:
        content = read_json(path)
    except ConversionError:
        return False
    return isinstance(content, Mapping) and {"config", "tensors"} <= content.keys()


def _questions(content: Any, title: str) -> Iterator[str]:
    """The questions in a part of the file, each with what it is about."""
    if isinstance(content, str) and content.lstrip().startswith(QUESTION):
        yield f"{title}: {shown(content)}"
    elif isinstance(content, dict):
        for name, each in content.items():
            yield from _questions(name, title)
            yield from _questions(each, title if name in KEYS else shown(name))
    elif isinstance(content, list):
        named = content[0] if content and isinstance(content[0], str) and not content[0].startswith(QUESTION) else ""
        for each in content:
            yield from _questions(each, shown(named) if named else title)


def _entry(given: Any, problems: dict[str, list[str]]) -> Entry | None:
    sides = [[each] if isinstance(each, str) else each for each in given[:2]] if isinstance(given, list) else []
    is_named = len(sides) == 2 and all(
        isinstance(side, list) and all(isinstance(name, str) and name for name in side) for side in sides
    )
    if not is_named or not sides[1]:
        problems[MALFORMED].append(shown(given))
        return None
    entry = Entry(tuple(map(Pattern, sides[0])), tuple(map(Pattern, sides[1])), tuple(given[2:]))
    try:
        words_in(entry.asked)
    except ConversionError as error:
        problems["unknown operations"].append(f"{entry.title}: {error}")
        return None
    words = [word_of(each)[0] for each in entry.asked]
    if (words == ["constant"]) is bool(sides[0]) or ("constant" in words and sides[0]):
        problems[MALFORMED].append(f'{shown(given)}: "constant" makes tensors of none, with an empty list of them')
        return None
    theirs, made = ({name for each in side for name in each.fields} for side in (entry.sources, entry.targets))
    if sides[0] and theirs - made and made - theirs:
        problems[MALFORMED].append(f"{shown(given)}: each side has a placeholder that the other lacks")
        return None
    return entry


def _matches(name: str, sides: Iterable[tuple[int, Sequence[Pattern]]]) -> list[tuple[int, int, Numbers]]:
    """Entry, place in it and numbers of every pattern that a name matches."""
    return [
        (index, slot, tuple(zip(pattern.fields, values, strict=True)))
        for index, patterns in sides
        for slot, pattern in enumerate(patterns)
        if (values := pattern.match(name)) is not None
    ]


def _of(numbers: Numbers, shared: frozenset[str]) -> Numbers:
    return tuple((place, number) for place, number in numbers if place in shared)


def _filled(text: str, numbers: Numbers) -> str:
    for place, number in numbers:
        text = text.replace(f"{{{place}}}", number)
    return text


def _empty(entry: Entry) -> Instance:
    return Instance([{} for _ in entry.sources], [{} for _ in entry.targets])


def _in_order(slots: Sequence[Mapping[tuple[int, ...], str]]) -> list[str]:
    """The names of an instance: place by place, each in the order of its numbers."""
    return [names[numbers] for names in slots for numbers in sorted(names)]
