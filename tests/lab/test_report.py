"""The report: intervals against known values, the table's words, plots and page made of rows alone."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from blockformer.cli import main
from blockformer.lab.experiment import LabError
from blockformer.lab.intervals import difference, power_law, spread, student_t
from blockformer.lab.plots import ticks
from blockformer.lab.report import scaling, write_report
from blockformer.lab.runs import read_rows
from blockformer.lab.table import group_rows, markdown

from .experiments import write_experiment

EVIL = "<script>alert('&')</script>|\"x\""


def row(variant, seed, bits, width=32, flops=1e9, **more):
    """A row as a run writes it, of made-up numbers."""
    name = variant if width == 32 else f"{variant}-width{width}"
    curve = [[100, 6.0 + seed / 10], [200, 5.0 + seed / 10]]
    return {
        "name": f"{name}-seed{seed}",
        "group": name,
        "variant": variant,
        "axis": variant.partition("=")[0],
        "settings": {},
        "width": width,
        "seed": seed,
        "bits_per_byte": bits,
        "diverged": None if bits else "the loss is NaN or infinite at step 3 of 10",
        "parameters": 1000 * width,
        "flops_per_token": flops / 200,
        "flops": flops,
        "tokens": 200,
        "epochs": 0.1,
        "seconds": 2.0,
        "held_out_tokens": 100,
        "held_out_bytes": 300,
        "curve": {"train": curve, "held_out": curve if bits else curve[:1]},
        "config": {"note": EVIL},
        "device": "cpu",
        "versions": {"torch": "2"},
        **more,
    }


def rows():
    """A base, one clearly worse, one better, one within the spread, one that diverged once and one always."""
    scores = {
        "base": (2.00, 2.01, 2.02),
        "norm_type=layer_norm": (2.30, 2.31, 2.32),
        "qk_norm=false": (1.80, 1.81, 1.83),
        "position_type=none": (1.95, 2.02, 2.10),
        "wild": (None, 2.0, 2.1),
        "wilder": (None, None, None),
    }
    return [row(name, seed, bits) for name, of_one in scores.items() for seed, bits in enumerate(of_one)]


# Intervals


@pytest.mark.parametrize(
    ("freedom", "expected"),  # from the tables
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (30, 2.04227), (1e4, 1.96020)],
)
def test_student_t_is_that_of_the_tables(freedom, expected):
    assert student_t(freedom) == pytest.approx(expected, rel=1e-5)


def test_a_difference_is_welch_s_interval():
    estimate, margin = difference([1.0, 2.0, 4.0], [2.0, 5.0, 3.0, 9.0])
    assert estimate == pytest.approx(7 / 3 - 19 / 4)
    assert margin == pytest.approx(4.72063, rel=1e-5)  # scipy.stats.ttest_ind(..., equal_var=False)
    assert spread([1.0, 2.0, 4.0]).deviation == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert difference([1.0], [2.0, 3.0]).margin is None
    assert difference([1.0, 1.0], [2.0, 2.0]) == (-1.0, 0.0)


def test_a_power_law_is_a_line_of_logarithms():
    compute, loss = [1.0, 2.0, 4.0, 8.0], [3.0, 2.5, 2.2, 1.8]
    law = power_law(compute, loss)
    slope, intercept = np.polyfit(np.log(compute), np.log(loss), 1)
    assert law.exponent.estimate == pytest.approx(-slope)
    assert law.factor == pytest.approx(np.exp(intercept))
    assert law.exponent.margin == pytest.approx(0.0587171, rel=1e-5)  # 4.30265 times scipy.stats.linregress's stderr
    exact = power_law([1e9, 1e10, 1e11], [5 * 1e9**-0.05, 5 * 1e10**-0.05, 5 * 1e11**-0.05])
    assert (exact.factor, exact.exponent.estimate) == pytest.approx((5, 0.05))
    assert exact.at(1e12) == pytest.approx(5 * 1e12**-0.05)
    assert power_law([1.0, 2.0], [2.0, 1.0]).exponent.margin is None
    with pytest.raises(ValueError, match="two different computes"):
        power_law([1.0, 1.0], [2.0, 1.0])


# The table


def test_the_table_says_what_is_clear_and_what_is_not():
    found = group_rows(rows(), ["base", "qk_norm=false"])
    assert [group.name for group in found][:2] == ["base", "qk_norm=false"]
    readings = {group.name: group.reading for group in found}
    assert readings == {
        "base": "",
        "norm_type=layer_norm": "worse",
        "qk_norm=false": "better",
        "position_type=none": "within the spread",
        "wild": "within the spread",
        "wilder": "diverged",
    }
    text = markdown(found, ["a note"])
    assert "| base | 32,000 | 2.0100 ± 0.0100 |  |  | 2 |" in text
    assert "| norm_type=layer_norm | 32,000 | 2.3100 ± 0.0100 | +0.3000 ± 0.0227 | worse | 2 |" in text
    assert "within the spread (1 of 3 diverged)" in text
    assert "| wilder | 32,000 | - |  | diverged | 2 |" in text
    assert "only if the interval does not contain 0." in text
    assert text.endswith("a note\n")
    alone = {group.name: group.reading for group in group_rows([each for each in rows() if each["seed"] == 1])}
    assert alone["qk_norm=false"] == "one seed shows no spread"
    assert group_rows([each for each in rows() if each["variant"] != "base"])[0].reading == "no base to compare with"


# Plots and page


def write(folder, found):
    (folder / "runs").mkdir(parents=True)
    for each in found:
        (folder / "runs" / f"{each['name']}.json").write_text(json.dumps(each))
    return write_report(folder, [], f"my {EVIL}")


class Outline(HTMLParser):
    """The tags, attributes and words of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [
            value for name, value in attrs if name in ("src", "href", "srcset", "action") or name[:2] == "on"
        ]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_has_all_curves_and_fetches_and_runs_nothing(tmp_path):
    write(tmp_path, rows())
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    outline = Outline(text)
    assert outline.links == []
    assert "script" not in outline.tags
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert EVIL in "".join(outline.words)  # as words
    assert outline.tags.count("summary") == 2 * 6
    assert outline.tags.count("svg") == 2 + 6  # differences, curves, and each config
    assert "prefers-color-scheme: dark" in text
    assert "#ffffff" not in text.partition("</style>")[2]
    for name in ("curves.svg", "differences.svg"):
        ElementTree.fromstring((tmp_path / name).read_text(encoding="utf-8"))
    assert not (tmp_path / "scaling.svg").exists()


@pytest.mark.parametrize("text", ["{", "3"])
def test_a_damaged_row_is_named(tmp_path, text):
    write(tmp_path / "one", rows())
    path = sorted((tmp_path / "one" / "runs").glob("*.json"))[0]
    path.write_text(text)
    with pytest.raises(LabError, match=rf"{re.escape(str(path))} .*: delete it, and its run is made again"):
        read_rows(tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "rows.jsonl").write_text(text)
    with pytest.raises(LabError, match=r"rows.jsonl .*: restore it"):
        read_rows(tmp_path / "two")


def test_a_report_of_the_gathered_rows_is_the_same(tmp_path):
    write(tmp_path / "one", rows())
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "rows.jsonl").write_text((tmp_path / "one" / "rows.jsonl").read_text())
    assert sorted(each["name"] for each in read_rows(tmp_path / "two")) == sorted(each["name"] for each in rows())
    write_report(tmp_path / "two", [], f"my {EVIL}")
    for name in ("table.md", "index.html", "curves.svg", "differences.svg", "rows.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_curves_of_one_run_alone_are_drawn(tmp_path):
    write(tmp_path, rows()[:1])
    assert not (tmp_path / "differences.svg").exists()
    assert "base" in (tmp_path / "curves.svg").read_text()


def test_ticks_are_round_and_inside():
    assert ticks(0.07, 0.43) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert ticks(-1, 1, 4) == pytest.approx([-1, -0.5, 0, 0.5, 1][:5])
    assert ticks(3, 3) == [3]


def test_a_ladder_has_a_power_law_for_each_config(tmp_path):
    found = [
        row(variant, seed, factor * flops**-0.05, width, flops)
        for variant, factor in (("base", 5.0), ("qk_norm=false", 6.0))
        for width, flops in ((32, 1e9), (64, 4e9), (128, 1.6e10))
        for seed in (0, 1)
    ]
    laws = scaling(group_rows(found))
    assert {name: law.exponent.estimate for name, (_, law) in laws.items()} == pytest.approx(
        {"base": 0.05, "qk_norm=false": 0.05}
    )
    write(tmp_path, found)
    ElementTree.fromstring((tmp_path / "scaling.svg").read_text(encoding="utf-8"))
    assert "qk_norm=false: bits per byte = 6 * FLOPs^-b with b = 0.0500" in (tmp_path / "table.md").read_text()
    assert "Power law" in (tmp_path / "index.html").read_text()


def test_a_ladder_of_real_runs(tmp_path, capsys):
    path = write_experiment(tmp_path, axes=None, seeds=[0], budget={"tokens_per_parameter": 0.01})
    with pytest.raises(SystemExit) as ended:
        main(["lab", str(path), "--output", str(tmp_path / "out"), "--widths", "32,64"])
    assert not ended.value.code, capsys.readouterr().err
    found = read_rows(tmp_path / "out")
    assert [(each["name"], each["width"]) for each in found] == [("base-seed0", 32), ("base-width64-seed0", 64)]
    assert all(each["tokens"] == 64 * round(0.01 * each["parameters"] / 64) for each in found)
    assert (tmp_path / "out" / "scaling.svg").exists()
