"""Show measured figures that stand on two pages by hand.

A figure is a number or a range with a unit of speed, time or memory, in a sentence. Each stands on one page, which says
how it was measured. Others link there, or a script writes it between two comments, as `speed_pages.py` does. Fences are
left out, and so are the Chinese pages: `tests/test_docs.py` compares each with its English one.

Usage: python scripts/figures.py    (exit status 1 if a figure stands twice)
"""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_BY_HAND = re.compile(r"^```.*?^```$|<!-- ([\w ]+) -->\n.*?<!-- end of \1 -->", re.M | re.S)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"ms|s|seconds|minutes|times|GB/s|GFLOPS|[KMG]i?B|tokens/s|"
    r"(?:tokens|texts|sentences) per second|% (?:faster|slower|longer)"
)
FIGURE = re.compile(rf"(?<![\w.,/^-])({NUMBER}(?: to {NUMBER})?) ?({UNIT})\b")
CELL = re.compile(r"(?<![\w.,])\d[\d,]*\.\d+(?![\w.])")
SHORT = {"seconds": "s"}
COINCIDENCES: Mapping[str, str] = {
    "1.2 GB": "the size of a checkpoint of Qwen3-0.6B, and the peak of a forward pass of another",
    "1.6 times": "converting, training and encoders in 8 bits",
    "45 GB/s": "the same memory in two runs",
}
"""Figure -> why pages have it independently of each other."""


def digits(number: str) -> int:
    """The significant digits of a number."""
    return len(re.sub(r"\D", "", number).lstrip("0"))


def pages() -> dict[str, str]:
    """Name -> text of each English page, without what scripts write."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {path.name: NOT_BY_HAND.sub("", path.read_text(encoding="utf-8")) for path in paths}


def twice(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Figure -> pages, for each that stands on more than one.

    A figure of four digits also stands twice if it is in a sentence of one page and a table of another. Shorter ones
    meet by chance in tables of hundreds. Figures of one digit, such as "2 times", are words.
    """
    said, listed = defaultdict(set), defaultdict(set)
    for name, text in texts.items():
        prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
        for number, unit in FIGURE.findall(" ".join(prose.split())):
            if digits(number) > 1:
                said[f"{number} {SHORT.get(unit, unit)}"].add(name)
        for line in text.splitlines():
            if line.startswith("|"):
                for number in CELL.findall(line):
                    listed[number].add(name)
    found = {}
    for figure, names in said.items():
        number = figure.split(" ")[0]
        others = listed[number] if digits(number) > 3 and " to " not in figure else set()
        if len(names | others) > 1 and figure not in COINCIDENCES:
            found[figure] = names | others
    return found


def main() -> int:
    found = twice(pages())
    for figure, names in sorted(found.items()):
        print(f"{figure}: {', '.join(sorted(names))}")
    if not found:
        print("every figure stands on one page")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
