"""The examples: their parts, and their way from start to end on very little text."""

import asyncio
import math
import sys
from pathlib import Path

import pytest
import torch
from example_files import load, load_forking

import blockformer
from blockformer.demo.search import EncoderMissing, docstrings, encoder_folder

try:
    encoder_folder()
except EncoderMissing as error:
    missing = str(error)
else:
    missing = ""
needs_encoder = pytest.mark.skipif(bool(missing), reason=missing)


@needs_encoder
def test_a_search_shows_ranked_hits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["search", "--limit", "40", "--count", "2", "--query", "abstract base class"])
    monkeypatch.setenv("COLUMNS", "160")
    example = load("semantic_search")
    some = docstrings(Path(asyncio.__file__).parent)
    monkeypatch.setattr(example, "docstrings", lambda: some)
    example.main()
    output = capsys.readouterr().out
    assert "40 docstrings embedded" in output
    scores = [float(line.split("│")[1]) for line in output.splitlines() if line.startswith("│")]
    assert len(scores) == 2
    assert 1 >= scores[0] >= scores[1] > 0


def test_no_text_of_the_classifier_is_both_trained_on_and_held_out(monkeypatch):
    example = load("finetune_classifier")
    monkeypatch.setattr(example, "PACKAGES", example.PACKAGES[:2])
    train, held_out = example.pieces(20)
    for part, most in ((train, 20), (held_out, 10)):
        labels = [piece.label for piece in part]
        assert set(labels) == set(range(len(example.PACKAGES)))
        assert max(map(labels.count, labels)) <= most
    assert not {piece.text for piece in train} & {piece.text for piece in held_out}
    assert example.pieces(20) == (train, held_out)


@needs_encoder
@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [pytest.param([], id="all", marks=pytest.mark.exhaustive), pytest.param(["--lora"], id="lora")]
)
def test_the_classifier_is_trained_saved_and_reloaded(tmp_path, fresh, capsys, monkeypatch, more):
    monkeypatch.setenv("COLUMNS", "160")
    example = load_forking("finetune_classifier", fresh, tmp_path, monkeypatch)
    monkeypatch.setattr(example, "PACKAGES", example.PACKAGES[:4])
    command = ["finetune_classifier", "--output", str(tmp_path / "repo"), "--pieces", "4", "--epochs", "1", *more]
    monkeypatch.setattr(sys, "argv", command)
    example.main()
    output = capsys.readouterr().out
    for line in ("most frequent class", "linear, on frozen features", "fine-tuned", "reloaded in a fresh process"):
        assert line in output
    assert (tmp_path / "repo/modeling_encoder.py").exists()


class Knowing:
    """Gives chosen logits whatever it is asked."""

    device = torch.device("cpu")

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, input_ids):
        return self


def test_masked_tokens_are_scored_beside_their_frequencies():
    example = load("train_masked_lm")
    labels = torch.tensor([[-100, 2, 1], [2, -100, 0]])
    batches = [{"input_ids": torch.zeros(2, 3, dtype=torch.long), "labels": labels}]
    score = example.unigram_score(torch.tensor([2, 2, 2, 1, 1]), batches, vocab_size=3)  # counts plus one: 1, 3, 4 of 8
    assert score.accuracy == 0.5
    assert score.loss == pytest.approx(-(2 * math.log(4 / 8) + math.log(3 / 8) + math.log(1 / 8)) / 4)

    logits = torch.zeros(2, 3, 3)
    logits[0, 1, 2] = logits[0, 2, 0] = 5.0  # one right, one wrong
    logits[1, 0, 2] = logits[1, 1, 1] = 5.0  # one right, one that nobody asked for
    logits[1, 2, 0] = 5.0  # right
    score = example.model_score(Knowing(logits), batches)
    assert score.accuracy == 0.75
    surprise = math.log(math.exp(5) + 2)
    assert score.loss == pytest.approx((3 * (surprise - 5) + surprise) / 4)


def test_the_questions_are_the_same_for_everyone_and_a_mask_hides_its_space():
    example = load("train_masked_lm")
    text = "def heap(x):\n    return x\n" * 40
    tokenizer = example.make_tokenizer([text], 300)
    assert tokenizer.convert_ids_to_tokens(tokenizer("import <mask>")["input_ids"])[-2:] == ["t", "<mask>"]
    blocks = example.Blocks(torch.tensor(tokenizer(text)["input_ids"]), 16)
    first, second = (example.masked_batches(blocks, tokenizer) for _ in range(2))
    assert all(torch.equal(one["labels"], two["labels"]) for one, two in zip(first, second, strict=True))
    labels = torch.cat([batch["labels"] for batch in first])
    assert len(labels) == len(blocks)
    assert 0.1 < (labels != -100).float().mean() < 0.2


@pytest.mark.slow
def test_a_masked_lm_is_trained_saved_and_reloaded(tmp_path, fresh, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    load_forking("train_masked_lm", fresh, tmp_path, monkeypatch).main(
        ["--output", str(tmp_path / "repo"), "--steps", "8", "--bytes", "300000"]
    )
    output = capsys.readouterr().out
    for line in ("token frequencies", "the encoder", "the same, reloaded in a fresh process", "return <mask>.name"):
        assert line in output
    config = blockformer.BlockformerEncoderConfig.from_pretrained(tmp_path / "repo")
    assert (config.position_type, config.norm_type, config.gated_mlp) == ("rotary", "rms_norm", True)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (tmp_path / "repo/modeling_encoder.py").exists()


def test_elsewhere_the_package_is_out_of_reach():
    elsewhere = load("elsewhere")
    answer = elsewhere.run_elsewhere("import json; print('noise'); print(json.dumps(sys.argv[1:]))", 3, "x")
    assert answer == ["3", "x"]
    with pytest.raises(elsewhere.ReloadError, match="out of reach"):
        elsewhere.run_elsewhere("import blockformer.presets")
