"""What a tag must agree with before it is published, and what the workflows may run."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

import blockformer

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGELOG = """# Changelog

## 0.3.0 (unreleased)

- new

## 0.2.0 (2026-11-30)

- better
- faster

## 0.1.0 (2026-10-01)
"""


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("release")
    sys.modules.pop("release")


def test_the_version_stands_once(release):
    assert release.version() == blockformer.__version__
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_notes_of_a_release_are_its_section(release):
    assert release.notes("0.2.0", CHANGELOG) == "- better\n- faster\n"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [("0.3.0", "needs a date"), ("0.1.0", "is empty"), ("0.4.0", "has no section"), ("0.2", "has no section")],
)
def test_a_release_without_notes_is_refused(release, wanted, problem):
    with pytest.raises(SystemExit, match=problem):
        release.notes(wanted, CHANGELOG)


def test_a_first_manifest_is_written_and_holds(release, monkeypatch, tmp_path):
    monkeypatch.setattr(release, "manifest", lambda wanted: tmp_path / "manifests" / f"{wanted}.json")
    monkeypatch.setattr(sys, "argv", ["release.py", "--manifest"])
    release.main()
    release.check_manifest(release.version())
    path = tmp_path / "manifests" / f"{release.version()}.json"
    path.write_text(path.read_text().replace('"stack.py": "', '"stack.py": "0'))
    with pytest.raises(SystemExit, match=r"stack\.py is not as its manifest says"):
        release.check_manifest(release.version())


def test_another_tag_is_refused(release, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["release.py", "v9.9.9"])
    with pytest.raises(SystemExit, match=rf"the tag is v9\.9\.9, and .* says {re.escape(blockformer.__version__)}"):
        release.main()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_what_they_run_and_have_few_rights(path):
    text = path.read_text(encoding="utf-8")
    read = yaml.safe_load(text)
    assert read["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action}: which version is that?"
    assert all("timeout-minutes" in job for job in read["jobs"].values())


def test_there_are_workflows():
    assert {path.stem for path in WORKFLOWS} >= {"ci", "nightly", "release"}
