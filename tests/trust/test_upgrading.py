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
from blockformer.conversion import ConversionError
from blockformer.conversion.exporting import export_folder
from blockformer.publishing import code_files, earlier_names

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
    for path in code_files(blockformer.preset("qwen3")):
        assert (repo / path.name).read_bytes() == path.read_bytes()
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
    assert {path.name for path in home.glob("*.py")} == {path.name for path in code_files(config)} != old_code
    after = load_file(home / "model.safetensors")
    assert not earlier_names.are_earlier(after)
    assert len(after) == len(before)
    cls = getattr(blockformer, json.loads((home / "config.json").read_text())["architectures"][0])
    logits = expected.pop("logits")
    with torch.no_grad():
        found = cls.from_pretrained(home).eval()(**expected).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-6 * logits.abs().max().item())


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
