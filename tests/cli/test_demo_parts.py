"""The demo's parts: text and its split, tokenizer, scores, budget, the folder it may write to, the round trip."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from blockformer import BlockformerDecoderForCausalLM
from blockformer.data import corpus
from blockformer.demo import fresh, roundtrip, search, steps, training_run
from blockformer.training.budget import Budget, learning_rate_factor


@pytest.fixture
def sources(tmp_path):
    """A folder with 40 source files, a test folder, a copy and a file that is not UTF-8."""
    for number in range(40):
        (tmp_path / f"module_{number}.py").write_text(f"# file {number}\n" + f"value_{number} = {number}\n" * 600)
    (tmp_path / "copy.py").write_text((tmp_path / "module_3.py").read_text())
    (tmp_path / "latin.py").write_bytes("# é\n".encode("latin-1"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_a.py").write_text("left_out = 1\n")
    return tmp_path


def test_split_has_no_file_and_no_content_twice(sources):
    text = corpus.gather(sources, held_out_share=0.1)
    names = [file.name for file in text.train + text.held_out]
    texts = [file.text for file in text.train + text.held_out]
    assert len(set(names)) == len(names) == len(set(texts)) == 40
    assert not any("left_out" in each for each in texts)
    assert 0.1 <= text.held_out_bytes / (text.held_out_bytes + text.train_bytes) < 0.2


def test_same_text_every_time_and_below_the_cap(sources):
    first = corpus.gather(sources, max_bytes=250_000)
    assert first == corpus.gather(sources, max_bytes=250_000)
    assert first.train_bytes + first.held_out_bytes <= 250_000
    assert {file.name for file in first.train} < {file.name for file in corpus.gather(sources).train}


def test_a_python_without_sources_is_said_so(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(corpus.CorpusError, match=r"only 6 bytes.*install Python with its sources"):
        corpus.gather(tmp_path)


def test_the_standard_library_is_enough():
    text = corpus.gather(max_bytes=400_000)
    assert text.held_out
    assert text.train_bytes > 200_000


def test_tokenizer_gives_any_text_back(sources):
    tokenizer = corpus.train_tokenizer((file.text for file in corpus.gather(sources).train), 300, 64)
    for text in ("value_7 = 7\n\tx", "nothing like it: é 漢字 \U0001f600", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) <= 300
    assert (tokenizer.eos_token, tokenizer.pad_token) == (corpus.END_OF_TEXT, corpus.PAD)


def test_encode_puts_every_file_between_two_ends(tiny_tokenizer):
    end = tiny_tokenizer.eos_token_id
    files = [corpus.SourceFile("a", "x = 1\n"), corpus.SourceFile("b", "y = 2\n")]
    ids = corpus.encode(files, tiny_tokenizer)
    assert [index for index, token in enumerate(ids.tolist()) if token == end] == [
        0,
        1 + len(tiny_tokenizer("x = 1\n").input_ids),
        len(ids) - 1,
    ]


class Uniform(torch.nn.Module):
    """A language model without an opinion, but for the one token that it never expects."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(vocab_size))

    def forward(self, input_ids):
        class Output:
            logits = self.logits.expand(*input_ids.shape, -1)

        return Output()


@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 33, 100])
def test_model_score_counts_every_token_once(tokens):
    score = corpus.model_score(Uniform(16), torch.randint(0, 16, (tokens,)), num_bytes=3 * tokens, length=8, batch=2)
    assert score.loss == pytest.approx(math.log(16), rel=1e-6)
    assert score.perplexity == pytest.approx(16, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(4 * (tokens - 1) / (3 * tokens), rel=1e-6)


def test_unigram_score_by_hand():
    train, held_out = torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1, 2])
    expected = -(math.log(3 / 6) + math.log(2 / 6) + math.log(1 / 6))
    score = corpus.unigram_score(train, held_out, num_bytes=8, vocab_size=3)
    assert score.loss == pytest.approx(expected / 3)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / 8)


def test_learning_rate_follows_the_budget():
    factors = [learning_rate_factor(used / 100) for used in range(101)]
    assert max(factors) == pytest.approx(factors[5]) == pytest.approx(1.0)
    assert factors[:6] == sorted(factors[:6])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[-1] == pytest.approx(0.05)
    assert all(factor > 0 for factor in factors)


def test_budget_ends_by_steps_or_by_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(training_run.time, "perf_counter", lambda: now[0])
    budget = Budget(seconds=10, max_steps=100)
    assert budget.used(0) == 0
    assert budget.used(25) == 0.25
    now[0] += 5
    assert budget.used(25) == 0.5
    now[0] += 100
    assert budget.used(25) == 1.0
    assert Budget(seconds=10, max_steps=100).used(250) == 1.0


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
    with pytest.raises(roundtrip.RoundTripError, match="Qwen3ForCausalLM gives other logits"):
        roundtrip.convert_and_compare(tmp_path / "repo", tmp_path / "official", expected)


def test_a_process_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(roundtrip.RoundTripError, match="the published repo failed in a fresh process"):
        roundtrip.reload_elsewhere(tmp_path, {}, Console(quiet=True), new_tokens=4)


@pytest.mark.slow
def test_the_whole_demo(tmp_path, monkeypatch):
    from blockformer.cli import app

    fewer = dataclasses.replace(steps.QUICK, corpus_bytes=300_000, max_steps=15, docstrings=12)
    monkeypatch.setattr(steps, "QUICK", fewer)
    some = search.docstrings(Path(asyncio.__file__).parent)
    monkeypatch.setattr(search, "docstrings", lambda: some)
    output = tmp_path / "out"
    result = CliRunner().invoke(app, ["demo", "--quick", "--output", str(output)])
    assert result.exit_code == 0, (result.output, result.exception)
    for step in range(1, 8):
        assert f"{step}/7" in result.output
    assert re.search(r"logits differ by at most \d", result.output)
    if "left out" not in result.output:
        words = " ".join(result.output.split())
        assert re.search(r"embeddings differ from those of transformers' BertModel by at most \d", words)
        assert (output / steps.ENCODER / "modeling_encoder.py").is_file()
    for name in (f"{steps.MODEL}/modeling_decoder.py", f"{steps.OFFICIAL}/config.json", steps.PICTURE, steps.FIGURES):
        assert (output / name).is_file(), name
    assert not list((output / steps.OFFICIAL).glob("*.py"))
