"""No measured figure stands in two places by hand; the script sees one that does."""

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
    assert {"README.md", "benchmarks.md", "gpu.md", "CHANGELOG.md", "qwen3.md"} <= set(pages)
    assert figures.twice(pages) == {}
    everywhere = "\n".join(pages.values()).replace("%", " %")
    assert [figure for figure in figures.COINCIDENCES if figure not in everywhere] == []


@pytest.mark.parametrize(
    ("first", "second", "figure"),
    [
        ("It takes 3.4 ms.", "A token takes\n3.4 ms there.", "3.4 ms"),
        ("It waits 52 seconds.", "It waits 52 s.", "52 s"),
        ("1.7 to 5 times as fast", "up to 1.7 to 5 times", "1.7 to 5 times"),
        ("It needs 17% longer.", "17% longer than that", "17 % longer"),
        ("A token takes 12.34 ms.", "| Qwen3 | 12.34 |", "12.34 ms"),
        ("Python takes 37 us.", "It takes 37 us.", "37 us"),
        ("It is 2.57x as fast.", "2.57 times as fast", "2.57 times"),
        ("It gains 0.81 to 0.87 there.", "0.81 to 0.87 on the Xeon", "0.81 to 0.87"),
        ("5.1 and 6.2 ms", "5.1, 7.3 and 8.4 ms", "5.1 ms"),
        ("1.57 / 1.42 / 1.03 times", "1.57 / 1.40 / 1.01 times", "1.57 times"),
        ("It loses 17% of its time.", "17% of the speed", "17 %"),
        ("| GPT-2 | 29.8 / 30.4 |", "| GPT-2, small | 29.8 / 30.4 |", "29.8 / 30.4"),
        ("| GPT-2 | 3.0 / 3.0 |", "| GPT-2, small | 3.0 / 3.0 |", None),
        ("It takes 3.4 ms.", "[3.4 ms](a.md#34-ms) `3.4 ms`", "3.4 ms"),
        ("It takes 3.4 ms.", "`3.4 ms`", None),
        ("torch 2.11", "torch 2.11, Python 3.10", None),
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


def test_a_figure_that_stands_twice_on_one_page_is_seen():
    assert figures.twice({"a.md": "It takes 12.34 ms. So 12.34 ms."}) == {"12.34 ms": {"a.md"}}
    assert figures.twice({"a.md": "| x | 29.8 / 30.4 |\n| y | 29.8 / 30.4 |"}) == {"29.8 / 30.4": {"a.md"}}
    assert figures.twice({"a.md": "It takes 12 ms, and so 12 ms."}) == {}
