"""Show measured figures that stand in two places by hand.

A figure is a number or a range with a unit of speed, time, memory or share in a sentence, also each number of a list
such as "2.57 / 1.42 times"; a range of ratios such as "0.81 to 0.87"; in tables a pair such as "29.8 / 30.4". Each
stands in one place, which says how it was measured. Others link there, or a script writes it between two comments, as
`speed_pages.py` does. Fences are left out, and so are the Chinese pages: `tests/test_docs.py` compares each with its
English one.

Usage: python scripts/figures.py    (exit status 1 if a figure stands twice)
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_BY_HAND = re.compile(r"^ *```.*?^ *```$|<!-- ([\w ]+) -->\n.*?<!-- end of \1 -->", re.M | re.S)
NOT_SAID = re.compile(r"`[^`]*`|(?<=\])\([^)]*\)")  # code, and where links lead
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"(?:ms|us|s|seconds|minutes|hours|times|x(?= as\b)|GB/s|GFLOPS|[KMG]i?B|tokens/s|"
    r"(?:tokens|texts|sentences|steps) per second)\b|% (?:faster|slower|longer|more|less)\b|%"
)
RANGE = rf"{NUMBER}(?: to {NUMBER})?"
FIGURES = re.compile(rf"(?<![\w.,/^-])({RANGE}(?:(?:, | and |, and | / ){RANGE})*) ?({UNIT})")
RATIOS = re.compile(r"(?<![\w.,/^-])\d+\.\d\d to \d+\.\d\d(?![\w.]| ?%)")
PAIR = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)? / \d[\d,]*(?:\.\d+)?(?![\w.,])")
CELL = re.compile(r"(?<![\w.,])\d[\d,]*\.\d+(?![\w.])")
SHORT = {"seconds": "s", "x": "times"}
COINCIDENCES: Mapping[str, str] = {
    "1.2 GB": "the size of a checkpoint of Qwen3-0.6B, and the peak of a forward pass of another",
    "1.6 times": "converting, training and encoders in 8 bits",
    "100 %": "how full a batch is",
    "15 %": "the most frequent package, and FLOPs of a kind of layer",
    "160 KiB": "computed from the config of Qwen3-14B",
    "3.8 ms": "matrices in parts, and an attention for prompts that was dropped",
    "27.5 GiB": "computed from the config of Qwen3-14B",
    "9.3 GiB": "computed from the config of Qwen3-14B with 4 bits",
}
"""Figure -> why pages have it independently of each other."""


def digits(number: str) -> int:
    """The significant digits of a number, or of the longest of a range."""
    return max(len(re.sub(r"\D", "", each).lstrip("0")) for each in re.split(r" to | / ", number))


def pages() -> dict[str, str]:
    """Name -> text of each English page, without what scripts write."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "model_cards").glob("*.md")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(paths) if "zh-CN" not in path.name}
    return {name: NOT_BY_HAND.sub("", text) for name, text in texts.items()}


def said_in(prose: str) -> Iterator[str]:
    """The figures in sentences. A figure of one digit, such as "2 times", is a word."""
    for numbers, unit in FIGURES.findall(prose):
        for number in re.split(r", and |, | and | / ", numbers):
            if digits(number) > 1:
                yield f"{number} {SHORT.get(unit, unit)}"
    yield from RATIOS.findall(prose)


def twice(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Figure -> pages, for each that stands on more than one, or twice on one.

    Short figures meet by chance: one of three digits counts as twice on one page, and one of four as in a sentence of
    one page and a table of another. Pairs of different numbers with three digits count wherever they are.
    """
    said, listed, paired = defaultdict(Counter), defaultdict(set), defaultdict(Counter)
    for name, text in texts.items():
        prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
        for figure in said_in(" ".join(NOT_SAID.sub("", prose).split())):
            said[figure][name] += 1
        for line in text.splitlines():
            if line.startswith("|"):
                for number in CELL.findall(line):
                    listed[number].add(name)
                for pair in PAIR.findall(line):
                    if digits(pair) > 2 and len({*pair.split(" / ")}) == 2:
                        paired[pair][name] += 1
    found = {}
    for figure, names in {**said, **paired}.items():
        number = figure.split(" ")[0]
        others = listed[number] if digits(number) > 3 and " to " not in figure and figure in said else set()
        repeated = figure in paired or digits(number) > 2
        if (len({*names} | others) > 1 or (repeated and names.total() > 1)) and figure not in COINCIDENCES:
            found[figure] = {*names} | others
    return found


def main() -> int:
    found = twice(pages())
    for figure, names in sorted(found.items()):
        print(f"{figure}: {', '.join(sorted(names))}")
    if not found:
        print("every figure stands in one place")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
