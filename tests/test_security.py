"""SECURITY.md against the tests that it names, and the promises that are about texts: pinned revisions, no network."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "SECURITY.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CALL = re.compile(
    r"(?:from_pretrained|from_config|pipeline|snapshot_download|hf_hub_download)\((?:[^()]|\([^()]*\))*\)"
)
CODE = ("src", "conversion", "examples", "scripts", "benchmarks")


@functools.cache
def names_of_tests(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def python_files():
    return [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]


def pages():
    """Every page that a reader copies from, the template of the cards too."""
    folders = [ROOT / "docs", ROOT / "model_cards"]
    return [*sorted(ROOT.glob("*.md")), *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def test_every_promise_names_tests_that_exist():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| **")]
    assert len(rows) >= 10
    for row in rows:
        named = NAMED.findall(row)
        assert named, row
        for file, name in named:
            assert (ROOT / file).exists(), file
            assert name in names_of_tests(ROOT / file), f"{file} has no {name}"


def unpinned(text):
    """The calls in a text that trust a repo by its Hub id, without a revision."""
    found = []
    for call in CALL.findall(text):
        source = re.search(r"\(\s*[\"']([^\"']+)[\"']", call)
        trusts = re.search(r"trust_remote_code\s*=\s*True", call)
        if trusts and source and HUB_ID.fullmatch(source[1]) and not re.search(r"\brevision\s*=", call):
            found.append(call)
    return found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('AutoModel.from_pretrained("a/b", trust_remote_code=True)', 1),
        ("AutoModel.from_pretrained(\n    'a/b-1.0',\n    dtype=str(3),\n    trust_remote_code = True,\n)", 1),
        ('pipeline("a/b", trust_remote_code=True)', 1),
        ('AutoModel.from_pretrained("a/b", revision="v1", trust_remote_code=True)', 0),
        ('AutoModel.from_pretrained("a/b")', 0),
        ('AutoModel.from_pretrained("./a/b", trust_remote_code=True)', 0),
        ("AutoModel.from_pretrained(folder, trust_remote_code=True)", 0),
    ],
)
def test_what_counts_as_unpinned(text, count):
    assert len(unpinned(text)) == count


def test_examples_that_trust_a_hub_repo_pin_its_revision():
    wrong = [
        f"{path.relative_to(ROOT)}: {call}"
        for path in [*pages(), *python_files()]
        for call in unpinned(path.read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)
    assert any("trust_remote_code=True" in path.read_text("utf-8") for path in pages())


def test_the_card_says_how_to_pin_a_revision():
    text = (ROOT / "model_cards" / "template.md").read_text(encoding="utf-8")
    assert "trust_remote_code=True" in text
    assert "revision=" in text


NETWORK = {"socket", "ssl", "http", "urllib", "requests", "httpx", "httpx2", "aiohttp", "ftplib", "smtplib", "asyncio"}
FETCHERS = {
    "snapshot_download",
    "hf_hub_download",
    "HfApi",
    "cached_file",
    "get_checkpoint_shard_files",
    "get_session",
    "whoami",
}

FETCHES_TESTS = ROOT / "scripts" / "clients" / "common_suite.py"
"""Of a checkout, not of the package: the tests of transformers that no wheel of it has."""


def from_cache(path):
    """The fetchers that a file imports and does not use, or calls with `local_files_only=True` alone: no connection."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    local = {}
    for call in calls:
        is_local = any(word.arg == "local_files_only" and ast.unparse(word.value) == "True" for word in call.keywords)
        name = ast.unparse(call.func)
        local[name] = local.get(name, True) and is_local
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return {name for name, is_local in local.items() if is_local} | (FETCHERS - used)


LISTENS = (ROOT / "examples" / "embedding_server.py", "http.server")
"""The example that is a server: it answers, and asks nobody."""


def test_only_the_hub_is_asked_and_in_three_places():
    """Conversion fetches a Hub id, a push sends: nothing else in the package knows a network."""
    asks = set()
    for path in python_files():
        fetchers = FETCHERS - from_cache(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom) and path != FETCHES_TESTS:
                names = {alias.name.partition(".")[0] for alias in node.names}
                module = (getattr(node, "module", None) or "").partition(".")[0]
                place = f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
                if getattr(node, "level", 0) == 0:
                    used = {module} if module else names
                    assert not used & NETWORK or (path, getattr(node, "module", None)) == LISTENS, place
                if names & fetchers or (isinstance(node, ast.Import) and "huggingface_hub" in names):
                    asks.add(path.relative_to(ROOT).as_posix())
    places = {"src/blockformer/files/sources.py", "src/blockformer/publishing/upload.py"}
    assert asks == places | {"src/blockformer/trust/verification.py"}
