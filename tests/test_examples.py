"""The examples: their parts, and their way from start to end on very little text."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from blockformer.cli.search import EncoderMissing, encoder_folder

EXAMPLES = Path(__file__).parents[1] / "examples"

try:
    encoder_folder()
except EncoderMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_search_shows_ranked_hits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["search", "--limit", "40", "--count", "2", "--query", "abstract base class"])
    monkeypatch.setenv("COLUMNS", "160")
    load("semantic_search").main()
    output = capsys.readouterr().out
    assert "40 docstrings embedded" in output
    scores = [float(line.split("│")[1]) for line in output.splitlines() if line.startswith("│")]
    assert len(scores) == 2
    assert 1 >= scores[0] >= scores[1] > 0


def test_no_text_of_the_classifier_is_both_trained_on_and_held_out():
    example = load("finetune_classifier")
    train, held_out = example.pieces(20)
    for part, most in ((train, 20), (held_out, 10)):
        labels = [piece.label for piece in part]
        assert set(labels) == set(range(len(example.PACKAGES)))
        assert max(map(labels.count, labels)) <= most
    assert not {piece.text for piece in train} & {piece.text for piece in held_out}
    assert example.pieces(20) == (train, held_out)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--lora"]], ids=["all", "lora"])
def test_the_classifier_is_trained_saved_and_reloaded(tmp_path, more):
    command = [sys.executable, EXAMPLES / "finetune_classifier.py", "--output", tmp_path / "repo", "--pieces", "10"]
    done = subprocess.run(
        [*command, "--epochs", "2", *more], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in ("most frequent class", "linear, on frozen features", "fine-tuned", "reloaded in a fresh process"):
        assert line in done.stdout
    assert (tmp_path / "repo/modeling_blockformer.py").exists()
