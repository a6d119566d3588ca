"""Names with numbered placeholders, and which of them a name matches.

Names that come from a checkpoint are only ever compared; they never become a pattern, a format string or a path.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from blockformer.files.errors import shown

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


class Pattern:
    """A name with placeholders, each standing for a decimal number; the beginning of names if it `is_open`."""

    def __init__(self, text: str, is_open: bool = False):
        self.text, self.is_open = text, is_open
        self.fields = sorted(set(PLACEHOLDER.findall(text)))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        pieces = PLACEHOLDER.split(self.text)  # literal, placeholder, literal, ...
        regex = re.escape(pieces[0])
        for index in range(1, len(pieces), 2):
            label, literal = pieces[index], pieces[index + 1]
            again = label in pieces[1:index:2]
            regex += (f"(?P={label})" if again else f"(?P<{label}>0|[1-9][0-9]{{0,8}})") + re.escape(literal)
        return re.compile(regex + ("(?s:.*)" if self.is_open else ""))

    def match(self, name: str) -> tuple[str, ...] | None:
        """The numbers of the placeholders, in the order of `fields`; None if the name does not match."""
        found = self._regex.fullmatch(name)
        return None if found is None else tuple(found[label] for label in self.fields)

    def fill(self, values: tuple[str, ...]) -> str:
        """The name with these numbers filled in."""
        numbers = dict(zip(self.fields, values, strict=True))
        return PLACEHOLDER.sub(lambda found: numbers[found[1]], self.text)


class Places:
    """Where the patterns of rules stand, found by name without trying each: experts make thousands of both.

    Patterns with placeholders in the same parts of a name (between its dots) differ in the other parts.
    """

    def __init__(self, sides: Sequence[Sequence[Pattern]]):
        self._places: dict[tuple[int, ...], dict[str, list[tuple[int, int, Pattern]]]] = {}
        for index, patterns in enumerate(sides):
            for slot, pattern in enumerate(patterns):
                parts = pattern.text.split(".")
                free = tuple(place for place, part in enumerate(parts) if PLACEHOLDER.search(part))
                by_rest = self._places.setdefault((len(parts), *free), {})
                by_rest.setdefault(_without(parts, free), []).append((index, slot, pattern))

    def near(self, name: str) -> list[tuple[int, int, Pattern]]:
        """Rule, place among its sources, and pattern of all that may match."""
        parts = name.split(".")
        shapes = ((shape, by_rest) for shape, by_rest in self._places.items() if shape[0] == len(parts))
        return [place for shape, by_rest in shapes for place in by_rest.get(_without(parts, shape[1:]), ())]


def _without(parts: Sequence[str], places: Sequence[int]) -> str:
    """The parts of a name, those at these places left out."""
    return ".".join("" if place in places else part for place, part in enumerate(parts))


def tuple_of(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names of one side of a rule."""
    return (names,) if isinstance(names, str) else names


def nothing_matched(tensors: Iterable[str], sources: list[list[Pattern]]) -> str:
    """The message for a checkpoint in which no name matches any rule."""
    names = list(tensors)
    patterns = [pattern for side in sources for pattern in side]
    if not names:
        return "the checkpoint holds no tensors"
    message = f"no tensor name matches: the checkpoint has names like {shown(names[0])}"
    if patterns:
        message += f", the rules expect names like {shown(patterns[0].text)}"
    for name in names[:100]:
        heads = [name[: found.end()] for found in re.finditer(r"\.", name[:200])]
        for pattern in patterns:
            for head in heads:
                if pattern.match(name[len(head) :]) is not None:
                    fix = "blockformer doctor FOLDER says whose it is, and --mend NEW takes it out"
                    return f"{message}; they match without the prefix {shown(head)}: {fix}"
            first = pattern.text.partition(".")[0] + "."
            if pattern.match(first + name) is not None:
                return f"{message}; they match with the prefix {shown(first)}: save the whole model, not its inner part"
    return f"{message}; is this another family? Check model_type in config.json, or name the family"
