"""Repos and `Trainer` checkpoints as each release wrote them, in `tests/museum/`, read natively and by their own code.

`tests/files/test_earlier_names.py` has the repos of before 0.1.0.
"""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from fork_server import program
from museum.make import model_of_run
from pairs import assert_close
from programs.museum_repo import answers
from programs.museum_run import train
from safetensors.torch import load_file

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.publishing import code_files
from blockformer.trust import manifest

pytestmark = [pytest.mark.versions, pytest.mark.portable]

MUSEUM = Path(__file__).parent / "museum"
RELEASES = sorted(path.parent for path in MUSEUM.glob("*/manifest.json"))
REPOS = sorted(path.parent for path in MUSEUM.glob("*/*/expected.json"))
WAYS = ("native", "own code")


def assemble(repo, folder):
    """A repo with its code and tokenizer, as it was written."""
    home, release = shutil.copytree(repo, folder / repo.parent.name / repo.name), repo.parent
    shutil.copytree(release / "tokenizer", home, dirs_exist_ok=True)
    extract_code(release, home)
    return home


def extract_code(release, home):
    """Put the code of a release's topology beside a config."""
    topologies = json.loads((release / "manifest.json").read_text())["topologies"]
    expected = json.loads((home / "expected.json").read_text()) if (home / "expected.json").exists() else {}
    with zipfile.ZipFile(release / "code.zip") as archive:
        archive.extractall(home, topologies[json.loads((home / "config.json").read_text())["model_type"]])
        for name in expected.get("left_out", ()):  # parts that the repo's config does not need
            (home / name).write_bytes(archive.read("left_out.py"))


@pytest.fixture
def repo(request, tmp_path):
    """One of them, without what it computes."""
    home = assemble(request.param, tmp_path)
    for name in ("expected.json", "expected.safetensors"):
        (home / name).unlink()
    return home


each = pytest.mark.parametrize("repo", REPOS, ids=lambda repo: f"{repo.parent.name}/{repo.name}", indirect=True)


def assert_same(logits, repo, exactly=False):
    expected = load_file(MUSEUM / repo.parent.name / repo.name / "expected.safetensors")["logits"]
    assert_close(logits, expected, 0 if exactly else 1e-5)


@torch.no_grad()
def computes(folder, repo):
    """The logits of a folder for the inputs of a repo, with the package's classes."""
    expected = json.loads((MUSEUM / repo.parent.name / repo.name / "expected.json").read_text())
    return answers(folder, expected["prompts"], expected["new_tokens"])


@pytest.fixture(scope="module")
def found(tmp_path_factory, processes):
    """What all repos compute, each way: before and after they were saved again."""
    results = {}
    for way in WAYS:
        folder = tmp_path_factory.mktemp("museum")
        homes = [assemble(repo, folder) for repo in REPOS]
        file = folder / "logits.safetensors"
        said = processes.said(program("museum_repo"), way, file, *homes, folder=folder, elsewhere=way == "own code")
        results[way] = {**json.loads(said), "logits": load_file(file)}
    return results


def test_there_are_repos_of_every_release():
    assert {path.name for path in RELEASES} >= {blockformer.__version__}
    for path in RELEASES:
        kinds = {json.loads(each.read_text())["model_type"] for each in path.glob("*/config.json")}
        assert kinds == json.loads((path / "manifest.json").read_text())["topologies"].keys()
    for path in manifest.FOLDER.glob("*.json"):  # `python tests/museum/make.py` writes the folder
        assert (MUSEUM / path.stem / "manifest.json").read_text() == path.read_text()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("repo", REPOS, ids=lambda repo: f"{repo.parent.name}/{repo.name}")
def test_it_computes_and_writes_what_it_did_and_does_so_after_another_save(found, repo, way):
    key, expected = f"{repo.parent.name}/{repo.name}", json.loads((repo / "expected.json").read_text())
    logits, texts = found[way]["logits"], found[way]["text"]
    assert_same(logits[key], repo, exactly=found[way]["where"] == expected["where"])
    assert texts[key] == texts[f"{key} again"] == expected["text"]
    assert torch.equal(logits[f"{key} again"], logits[key])
    assert torch.equal(logits[key], found["native"]["logits"][key])


@each
def test_its_code_is_its_release_s_and_an_upgrade_gives_it_the_installed_one(repo, tmp_path, monkeypatch):
    known = tmp_path / "manifests"
    known.mkdir()
    shutil.copy(MUSEUM / repo.parent.name / "manifest.json", known / f"{repo.parent.name}.json")
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FOLDER", known)
        assert blockformer.verify(repo).problems == {}
    weights = (repo / "model.safetensors").read_bytes()
    upgraded = blockformer.upgrade(repo)
    assert (upgraded.problems, upgraded.release) == ({}, blockformer.__version__)
    answer = computes(repo, repo)
    code = code_files(answer["model"].config)
    assert code.keys() == {path.name for path in repo.glob("*.py")}
    assert all((repo / name).read_bytes() == path.read_bytes() for name, path in code.items())
    assert (repo / "model.safetensors").read_bytes() == weights
    assert_same(answer["logits"], repo)


@each
def test_it_goes_to_the_official_layout_and_back(repo, tmp_path):
    if repo.name == "mix":
        with pytest.raises(ConversionError, match="norm_type"):
            convert(repo, tmp_path / "official", to_official=True)
        return
    report = convert(repo, tmp_path / "official", to_official=True)
    assert report.parity is not None
    convert(tmp_path / "official", tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (repo, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert_same(computes(tmp_path / "back", repo)["logits"], repo)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_checkpoint_of_trainer_goes_on_as_the_run_did(release, way, fresh, tmp_path):
    run = json.loads((release / "trainer" / "run.json").read_text())
    folder, output = shutil.copytree(release / "trainer", tmp_path / "run"), tmp_path / "output"
    checkpoint = folder / "checkpoint-2"
    assert blockformer.last_complete_checkpoint(folder) == str(checkpoint)
    if way == "native":
        losses = train(model_of_run(run), output, run, checkpoint)
    else:
        extract_code(release, checkpoint)
        losses = json.loads(fresh(program("museum_run"), folder, output, folder=tmp_path))
    assert len(losses) == 3
    assert losses == pytest.approx(run["losses"][2:], rel=1e-6)
