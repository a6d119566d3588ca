"""The demo's parts: its training, the folder it may write to, the round trip."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
import torch
from rich.console import Console
from short_demo import shorten
from typer.testing import CliRunner

from blockformer import BlockformerDecoderForCausalLM
from blockformer.data import corpus
from blockformer.demo import fresh, roundtrip, steps, training_run
from blockformer.training.budget import Budget


def test_quickest_threads_measures_and_restores(monkeypatch):
    monkeypatch.setattr(training_run.time, "perf_counter", lambda: now[0])
    now, before = [0.0], torch.get_num_threads()
    torch.set_num_threads(4)
    try:

        def step():
            now[0] += {1: 3.0, 2: 1.0, 4: 2.0}[torch.get_num_threads()]

        assert training_run.quickest_threads(step) == 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_training_learns_and_draws(tmp_path):
    sizes = steps.QUICK
    model = BlockformerDecoderForCausalLM(sizes.config(end=0, pad=1))
    ids = torch.arange(2, 18).repeat(400)
    blocks = corpus.Blocks(ids, 64)
    run = training_run.train(
        model, blocks, corpus.Blocks(ids, 64, limit=4), Budget(120, 30), Console(quiet=True),
        batch=4, block_length=64, learning_rate=1e-2,
    )  # fmt: skip
    assert (run.steps, run.tokens) == (30, 30 * 4 * 64)
    assert len(run.curve.held_out) >= 3
    assert run.curve.held_out[-1][1] < 0.5 * run.curve.train[0][1]
    assert [tokens for tokens, _ in run.curve.train] == sorted(tokens for tokens, _ in run.curve.train)
    assert not model.training
    assert model.config.use_cache
    training_run.draw(run.curve, 4.0, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_divergence_is_an_error():
    model = BlockformerDecoderForCausalLM(steps.QUICK.config(end=0, pad=1))
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    blocks = corpus.Blocks(torch.arange(2, 18).repeat(40), 64)
    with pytest.raises(FloatingPointError, match="diverged"):
        training_run.train(
            model, blocks, blocks, Budget(60, 2), Console(quiet=True),
            batch=2, block_length=64, learning_rate=1e-3,
        )  # fmt: skip


def test_a_strange_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(steps.DemoError, match="choose another --output"):
        steps.prepare(tmp_path, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(steps.DemoError, match="is not a folder"):
        steps.prepare(tmp_path / "thesis.txt", force=True)
    steps.prepare(tmp_path, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_its_own_folder_is_emptied_of_its_own_files(tmp_path):
    steps.prepare(tmp_path / "out", force=False)
    (tmp_path / "out" / steps.MODEL).mkdir()
    (tmp_path / "out" / steps.FIGURES).write_text("{}")
    (tmp_path / "out" / "notes.txt").write_text("kept")
    steps.prepare(tmp_path / "out", force=False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [steps.MARKER, "notes.txt"]


@pytest.mark.parametrize("name", [steps.MODEL, steps.OFFICIAL, steps.ENCODER])
def test_a_folder_of_somebody_else_s_with_a_name_of_the_demo_stays(tmp_path, name):
    (tmp_path / name / ".git").mkdir(parents=True)
    (tmp_path / name / ".git/HEAD").write_text("ref: refs/heads/main")
    with pytest.raises(steps.DemoError, match=f"{name}: was not made by Blockformer"):
        steps.prepare(tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / ".git/HEAD").exists()


def test_reloading_finds_a_changed_weight(tmp_path, processes, tiny_tokenizer):
    from blockformer import export_model

    model = BlockformerDecoderForCausalLM(steps.QUICK.config(end=0, pad=1)).eval()
    expected = roundtrip.expectation(model, torch.randint(2, 512, (200,)))
    with torch.no_grad():
        model.model.norm.weight[3] += 0.01
    export_model(model, tmp_path / "repo", tokenizer=tiny_tokenizer)
    torch.save(expected, tmp_path / "expected.pt")
    arguments = (fresh.__file__, tmp_path / "repo", tmp_path / "expected.pt", roundtrip.PROMPT, 4)
    script = "import runpy; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = processes.run(script, *arguments, folder=tmp_path, elsewhere=False)
    assert done.returncode == 1
    assert "the reloaded model's logits differ" in done.stderr
    with pytest.raises(roundtrip.RoundTripError, match="Qwen3ForCausalLM computes other logits"):
        roundtrip.convert_and_compare(tmp_path / "repo", tmp_path / "official", expected)


def test_a_process_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(roundtrip.RoundTripError, match="the published repo failed in a fresh process"):
        roundtrip.reload_elsewhere(tmp_path, {}, Console(quiet=True), new_tokens=4)


@pytest.mark.slow
def test_the_whole_demo(tmp_path, monkeypatch):
    from blockformer.cli import app

    shorten(monkeypatch)
    output = tmp_path / "out"
    result = CliRunner().invoke(app, ["demo", "--quick", "--output", str(output)])
    assert result.exit_code == 0, (result.output, result.exception)
    for step in range(1, 8):
        assert f"{step}/7" in result.output
    assert re.search(r"logits differ by at most \d", result.output)
    assert "15 steps do not beat the unigram baseline; try a longer run" in " ".join(result.output.split())
    if "left out" not in result.output:
        words = " ".join(result.output.split())
        assert re.search(r"embeddings differ from transformers' BertModel by at most \d", words)
        assert (output / steps.ENCODER / "modeling_encoder.py").is_file()
    for name in (f"{steps.MODEL}/modeling_decoder.py", f"{steps.OFFICIAL}/config.json", steps.PICTURE, steps.FIGURES):
        assert (output / name).is_file(), name
    assert not list((output / steps.OFFICIAL).glob("*.py"))
