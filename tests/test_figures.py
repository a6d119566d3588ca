"""No measured figure stands on two pages by hand; the script sees one that does."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "figures.py"
spec = importlib.util.spec_from_file_location("figures", SCRIPT)
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)


def test_no_figure_stands_on_two_pages():
    """`python scripts/figures.py` lists them: keep one and link to it."""
    pages = figures.pages()
    assert {"README.md", "benchmarks.md", "gpu.md"} <= set(pages)
    assert figures.twice(pages) == {}
    everywhere = "\n".join(pages.values())
    assert [figure for figure in figures.COINCIDENCES if figure not in everywhere] == []


@pytest.mark.parametrize(
    ("first", "second", "figure"),
    [
        ("It takes 3.4 ms.", "A token takes\n3.4 ms there.", "3.4 ms"),
        ("It waits 52 seconds.", "It waits 52 s.", "52 s"),
        ("1.7 to 5 times as fast", "up to 1.7 to 5 times", "1.7 to 5 times"),
        ("It needs 17% longer.", "17% longer than that", "17 % longer"),
        ("A token takes 12.34 ms.", "| Qwen3 | 12.34 |", "12.34 ms"),
        ("It takes 3.4 ms.", "```\n3.4 ms\n```", None),
        ("It takes 3.4 ms.", "<!-- speed -->\n3.4 ms\n<!-- end of speed -->\n", None),
        ("It takes 3.4 ms.", "It takes 13.4 ms and 3.4 s.", None),
        ("It is 2 times as fast.", "It is 2 times as fast.", None),
    ],
)
def test_a_figure_that_stands_twice_is_seen(first, second, figure, tmp_path):
    second = figures.NOT_BY_HAND.sub("", second)
    found = figures.twice({"a.md": first, "b.md": second})
    assert found == ({figure: {"a.md", "b.md"}} if figure else {})
