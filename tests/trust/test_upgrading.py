"""`upgrade`: an older repo gets today's code, config and card, its weights stay, and a failure leaves it as it was."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from museum.earliest import REPOS, assemble
from safetensors.torch import load_file
from transformers import AutoConfig

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.exporting import export_folder
from blockformer.files import earlier_names
from blockformer.files.atomic import MARK, mark
from blockformer.publishing import code_files
from blockformer.trust import upgrading

MUSEUM = Path(__file__).parents[1] / "museum"
SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def repo(tmp_path):
    config = blockformer.preset("qwen3", **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return blockformer.export_model(blockformer.BlockformerDecoderForCausalLM(config), tmp_path / "repo")


def test_an_old_repo_is_as_today_s_and_its_weights_stay(repo):
    weights, inode = (repo / "model.safetensors").read_bytes(), (repo / "model.safetensors").stat().st_ino
    settings = json.loads((repo / "config.json").read_text())
    old = {name: value for name, value in settings.items() if not name.startswith("blockformer_")}
    (repo / "config.json").write_text(json.dumps({**old, "qk_norm": True}))
    (repo / "stack.py").write_text((repo / "stack.py").read_text() + "from .former import x\n")
    (repo / "former.py").write_text("x = 1\n")  # of a release that had it
    (repo / "mine.py").write_text("y = 2\n")
    (repo / "notes").mkdir()
    (repo / "notes/a.txt").write_text("kept")
    (repo / "README.md").write_text("# Mine\n\n## Code\n\nold words\n\n## After\n\nkept\n")
    found = blockformer.upgrade(repo)
    assert found.problems.keys() == {"code"}
    assert found.problems["code"] == ["'mine.py' is not code of Blockformer: read it, or do not load the repo"]
    assert (repo / "model.safetensors").read_bytes() == weights
    assert (repo / "model.safetensors").stat().st_ino == inode
    assert json.loads((repo / "config.json").read_text()) == settings
    assert not (repo / "former.py").exists()
    assert (repo / "notes/a.txt").read_text() == "kept"
    for name, path in code_files(blockformer.preset("qwen3")).items():
        assert (repo / name).read_bytes() == path.read_bytes()
    card = (repo / "README.md").read_text()
    assert "old words" not in card
    assert "`attention.py`" in card
    assert card.endswith("## After\n\nkept\n")
    (repo / "mine.py").unlink()
    assert blockformer.verify(repo).is_ok


@pytest.mark.parametrize("earliest", REPOS, ids=lambda repo: repo.name)
def test_a_repo_of_the_museum_is_upgraded_with_its_code_and_its_names(earliest, tmp_path):
    home = assemble(earliest, tmp_path)
    expected = load_file(earliest / "expected.safetensors")
    before, old_code = load_file(home / "model.safetensors"), {path.name for path in home.glob("*.py")}
    state, code = (found := blockformer.verify(home)).problems["code"]
    assert found.problems.keys() == {"code", "weights"}
    assert "the repo is from before 0.1.0" in state
    assert all(repr(name) in code for name in old_code)
    assert "names of before 0.1" in found.problems["weights"][0]
    found = blockformer.upgrade(home)
    assert (found.release, found.problems) == (blockformer.__version__, {})
    assert blockformer.verify(home).problems == found.problems
    config = AutoConfig.from_pretrained(home)
    assert {path.name for path in home.glob("*.py")} == code_files(config).keys() != old_code
    after = load_file(home / "model.safetensors")
    assert not earlier_names.are_earlier(after)
    assert len(after) == len(before)
    cls = getattr(blockformer, json.loads((home / "config.json").read_text())["architectures"][0])
    logits = expected.pop("logits")
    with torch.no_grad():
        found = cls.from_pretrained(home).eval()(**expected).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5 * logits.abs().max().item())


def test_pickles_with_names_of_before_are_not_upgraded(tmp_path):
    """The repo's new code would not find them; `export` can write them."""
    old = tmp_path / "old"
    old.mkdir()
    shutil.copy(MUSEUM / "2026-11-20/gpt2/config.json", old)
    torch.save(load_file(MUSEUM / "2026-11-20/gpt2/model.safetensors"), old / "pytorch_model.bin")
    before = contents(old)
    with pytest.raises(ConversionError, match=r"one of 8 names of before 0\.1.*`blockformer export`"):
        blockformer.upgrade(old)
    assert contents(old) == before
    export_folder(old, tmp_path / "new")
    assert blockformer.verify(tmp_path / "new").is_ok


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ConversionError, match=r"no config\.json; the folder is empty: name the one with the model"):
        blockformer.upgrade(tmp_path)


def test_a_trainer_checkpoint_of_before_is_not_upgraded(tmp_path):
    """Under today's names it would be resumed, with the momentum of other weights."""
    old = shutil.copytree(MUSEUM / "2026-11-20" / "trainer" / "checkpoint-2", tmp_path / "checkpoint-2")
    before = contents(old)
    with pytest.raises(
        ConversionError, match=r"checkpoint-2: a Trainer checkpoint of before 0\.1.*`blockformer export`"
    ):
        blockformer.upgrade(old)
    assert contents(old) == before
    export_folder(old, tmp_path / "new")
    assert blockformer.verify(tmp_path / "new").is_ok


def test_permissions_stay(repo, tmp_path):
    """Git does not run a hook that lacks the execute bit, and says so only in a hint."""
    modes = {".git/hooks/pre-push": 0o755, ".git/objects/0a": 0o444, "model.safetensors": 0o600, "README.md": 0o640}
    for name in (".git/hooks/pre-push", ".git/objects/0a"):
        (repo / name).parent.mkdir(parents=True)
        (repo / name).write_text("#!/bin/sh\n")
    old = shutil.copytree(MUSEUM / "2026-11-20" / "gpt2", tmp_path / "old")  # its weights are written anew
    (old / "model.safetensors").chmod(0o600)
    for name, mode in modes.items():
        (repo / name).chmod(mode)
    for folder in (repo, old):
        blockformer.upgrade(folder)
    assert {name: stat.S_IMODE((repo / name).stat().st_mode) for name in modes} == modes
    assert stat.S_IMODE((old / "model.safetensors").stat().st_mode) == 0o600


def clone_of(repo):
    """The repo as a git clone with a history, a hook, notes and an empty folder, all of its owner's."""
    (repo / MARK).unlink()
    for name in (".git/HEAD", ".git/objects/0a/b1", ".git/hooks/pre-push", ".gitattributes"):
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text("#!/bin/sh\n")
    (repo / ".git/hooks/pre-push").chmod(0o755)
    (repo / "notes.txt").write_text("years")
    (repo / "figures").mkdir(mode=0o700)


def test_a_clone_stays_its_owner_s(repo, tmp_path):
    """The mark names nothing of the owner's, so `force` refuses."""
    clone_of(repo)
    old = json.loads((repo / "config.json").read_text()) | {"blockformer_version": "0.0.9"}
    (repo / "config.json").write_text(json.dumps(old))
    before = contents(repo)
    blockformer.upgrade(repo)
    marked = json.loads((repo / MARK).read_text())["files"]
    assert not marked.keys() & before.keys()
    after = contents(repo)
    assert {name for name in before if before[name] != after.get(name)} == {"config.json"}
    assert stat.S_IMODE((repo / "figures").stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]
    assert stat.S_IMODE((repo / ".git/hooks/pre-push").stat().st_mode) == 0o755
    check_spared(repo)


def check_spared(repo):
    """That nothing which replaces a folder replaces this one."""
    before, model = contents(repo), blockformer.BlockformerDecoderForCausalLM.from_pretrained(repo)
    source = blockformer.export_model(model, repo.parent / "source")
    for write in (
        lambda: blockformer.export_model(model, repo, force=True),
        lambda: export_folder(source, repo, force=True),
        lambda: convert(source, repo, to_official=True, force=True, verify=False),
    ):
        with pytest.raises(ConversionError, match=r"holds .*, which Blockformer did not write, so force=True does not"):
            write()
        assert contents(repo) == before


def test_a_mark_of_before_that_names_the_history_is_not_believed(repo):
    """Earlier, `upgrade` put all files of a folder under our mark."""
    clone_of(repo)
    mark(repo)
    assert ".git/HEAD" in json.loads((repo / MARK).read_text())["files"]
    check_spared(repo)
    shutil.rmtree(repo.parent / "source")
    blockformer.upgrade(repo)
    assert json.loads((repo / MARK).read_text())["files"] == {}
    check_spared(repo)


def test_a_folder_that_was_ours_stays_ours(repo, tmp_path):
    model = blockformer.BlockformerDecoderForCausalLM.from_pretrained(repo)
    (repo / "alibi.py").unlink()
    blockformer.upgrade(repo)
    assert "alibi.py" in json.loads((repo / MARK).read_text())["files"]
    blockformer.export_model(model, repo, force=True)
    (repo / "notes.txt").write_text("years")
    blockformer.upgrade(repo)
    with pytest.raises(ConversionError, match=r"holds 'notes\.txt'"):
        blockformer.export_model(model, repo, force=True)


def test_a_folder_that_changes_meanwhile_is_left_as_it_is(repo, monkeypatch):
    real, before = upgrading.copy_code, contents(repo)

    def copy(*arguments):
        assert contents(repo) == before  # what a kill would leave
        (repo / "notes.txt").write_text("years")
        return real(*arguments)

    monkeypatch.setattr(upgrading, "copy_code", copy)
    with pytest.raises(ConversionError, match=r"'notes\.txt' was changed, while it was read"):
        blockformer.upgrade(repo)
    assert contents(repo) == before | {"notes.txt": b"years"}
    assert [path.name for path in repo.parent.iterdir()] == ["repo"]


def test_code_of_the_owner_s_is_never_overwritten(repo):
    edit(repo, auto_map={})
    (repo / "attention.py").write_text("mine\n")
    before = contents(repo)
    with pytest.raises(ConversionError, match=r"alibi\.py, attention\.py, .* auto_map does not lead to"):
        blockformer.upgrade(repo)
    assert contents(repo) == before


def test_code_is_found_through_an_auto_map_that_names_the_hub(repo):
    codes = blockformer.BlockformerDecoderConfig.auto_classes
    edit(repo, auto_map={name: f"somebody/repo--{code}" for name, code in codes.items()})
    assert not blockformer.verify(repo).is_ok
    assert blockformer.upgrade(repo).is_ok


def edit(repo, **entries):
    path = repo / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda repo: edit(repo, blockformer_version="99.1.0"),
            r"Blockformer 99\.1\.0 wrote it.*nothing is down",
        ),
        (lambda repo: edit(repo, blockformer_format=9), "nothing is downgraded"),
        (lambda repo: edit(repo, model_type="bert"), "model_type 'bert' is not one of Blockformer's"),
        (lambda repo: edit(repo, new_block=1), "config.json: .*new_block"),
        (lambda repo: edit(repo, hidden_size=32), "not upgraded, its weights are not the config's"),
        (lambda repo: os.truncate(repo / "model.safetensors", 3000), r"repo/model\.safetensors: damaged, download it"),
        (lambda repo: (repo / "x.txt").symlink_to(repo / "config.json"), "a link"),
    ],
)
def test_what_cannot_be_upgraded_is_left_as_it_was(spoil, message, repo):
    spoil(repo)
    before = contents(repo)
    with pytest.raises(ConversionError, match=message):
        blockformer.upgrade(repo)
    assert contents(repo) == before
    assert [path.name for path in repo.parent.iterdir()] == ["repo"]
    with pytest.raises(ConversionError, match="no such folder"):
        blockformer.upgrade(repo / "nowhere")
