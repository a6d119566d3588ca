"""The GPT example: the text it takes and refuses, its sampling against a plain loop, and its way from start to end."""

import json
import sys

import pytest
import torch
from example_files import load, load_forking
from pairs import model, token_ids

import blockformer
from blockformer import PRESETS
from blockformer.data.corpus import SourceFile
from blockformer.data.text_files import HELD_OUT, collect, split
from blockformer.demo.training_run import Curve

LEARNED = {"position_type": "learned", "rope_parameters": None}


@pytest.fixture(scope="module")
def example():
    return load("train_gpt")


def lines(count, seed=0):
    """So many lines of words, 40 bytes each."""
    words = token_ids(count, 7, seed=seed).tolist()
    return "".join(" ".join(f"{word:04d}" for word in row) + " end.\n" for row in words)


# Sampling


@torch.no_grad()
def drawn_by_hand(a_model, ids, new_tokens, temperature, top_k, seed):
    """The loop of the textbooks: the whole text again for each token, the k likeliest, a draw."""
    torch.manual_seed(seed)
    for _ in range(new_tokens):
        logits = a_model(ids, use_cache=False).logits[:, -1] / temperature
        if top_k:
            least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return ids


@pytest.mark.parametrize(
    ("settings", "top_k", "temperature"),
    [({}, top_k, temperature) for top_k in (0, 1, 5, 1000) for temperature in (0.7, 4.0)] + [(LEARNED, 5, 1.0)],
)
def test_temperature_and_top_k_are_the_plain_loop(settings, top_k, temperature):
    a_model = model(eos_token_id=None, **settings)
    ids = token_ids(3, 6)
    expected = drawn_by_hand(a_model, ids, 20, temperature, top_k, seed=3)
    torch.manual_seed(3)
    written = a_model.generate(ids, do_sample=True, temperature=temperature, top_k=top_k, max_new_tokens=20)
    assert torch.equal(written, expected)
    greedy = a_model.generate(ids, do_sample=False, max_new_tokens=20)
    assert torch.equal(written, greedy) is (top_k == 1)


def test_samples_go_on_from_the_prompt_as_the_plain_loop_does(example, tiny_tokenizer):
    a_model = model(vocab_size=len(tiny_tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=None)
    ids = tiny_tokenizer("def insort(a, x", return_tensors="pt").input_ids
    torch.manual_seed(5)
    settings = {"do_sample": True, "temperature": 2.0, "top_k": 7}
    written = example.write(a_model, tiny_tokenizer, ["def insort(a, x"], 12, **settings)
    by_hand = drawn_by_hand(a_model, ids, 12, temperature=2.0, top_k=7, seed=5)[0, ids.shape[1] :]
    assert written == [tiny_tokenizer.decode(by_hand, skip_special_tokens=True)]


# The text


def test_what_lies_in_a_folder_is_taken_and_the_rest_is_named(example, tmp_path):
    for name, data in {
        "a.txt": b"first\r\nline\n",
        "b/c": "\N{BYTE ORDER MARK}zweite: äöü\n".encode(),
        "copy.txt": b"first\nline\n",
        "empty.txt": b" \n",
        "picture.png": b"\x89PNG\0\0",
        "latin.txt": "äöü".encode("latin-1"),
        ".git/config": b"hidden",
        "b/.hidden": b"hidden",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    files, left_out = collect([tmp_path], 10_000)
    assert sorted(file.text for file in files) == ["first\nline\n", "zweite: äöü\n"]
    assert sorted(left_out) == [
        f"{tmp_path}/latin.txt: not UTF-8 (byte 0); convert it, for example with `iconv`",
        f"{tmp_path}/picture.png: a binary file, not plain text",
    ]
    named, _ = collect([tmp_path / "a.txt", tmp_path / "b", tmp_path / "a.txt"], 10_000)
    assert sorted(file.name for file in named) == ["a.txt", "c"]
    assert collect([tmp_path], 10_000) == (files, left_out)


def test_no_more_is_read_than_asked_for(example, tmp_path):
    (tmp_path / "one.txt").write_text("ä" * 600, encoding="utf-8")
    (tmp_path / "two.txt").write_text("b" * 600, encoding="utf-8")
    files, left_out = collect([tmp_path], 1001)
    assert 999 <= sum(file.num_bytes for file in files) <= 1001
    assert len(files) == 2
    assert not left_out


def test_whole_files_are_held_out_where_they_are_small_enough(example):
    files = [SourceFile(f"{at}.txt", lines(100, seed=at)) for at in range(50)]
    text = split(files)
    assert set(text.train) | set(text.held_out) == set(files)
    assert not set(text.train) & set(text.held_out)
    share = text.held_out_bytes / (text.train_bytes + text.held_out_bytes)
    assert HELD_OUT <= share <= 2 * HELD_OUT
    assert split(files) == text


@pytest.mark.parametrize("count", [1, 2])
def test_the_end_of_the_largest_file_is_held_out_where_all_are_large(example, count):
    files = [SourceFile(f"{at}.txt", lines(4010 * (at + 1), seed=at)) for at in range(count)]
    text = split(files)
    largest = files[-1].text
    assert [file.name for file in text.held_out] == [f"the end of {count - 1}.txt"]
    assert text.train[-1].text + text.held_out[0].text == largest
    assert text.train[-1].text.endswith("end.\n")
    assert text.train[:-1] == tuple(files[:-1])
    assert text.held_out_bytes == pytest.approx(0.05 * sum(file.num_bytes for file in files), abs=41)


def test_a_line_without_end_is_cut_between_characters(example):
    text = split([SourceFile("one.txt", "ä" * 20_001)])
    assert set(text.train[0].text) == set(text.held_out[0].text) == {"ä"}


FAULTS = {
    "missing": (None, "no such file or folder"),
    "empty": (b"", "only 0 bytes of text"),
    "short": (b"a few words", "only 11 bytes of text: use at least 20,000"),
    "binary": (b"\x7fELF\0" * 9000, "a binary file, not plain text"),
    "latin": (b"caf\xe9 " * 9000, "not UTF-8 (byte 3); convert it"),
    "wide": ("text".encode("utf-16"), "UTF-16 text; save it as UTF-8"),
    "same": (b"a" * 30_000, "too little text, or too much of the same"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_text_that_cannot_be_used_is_refused_in_a_sentence(example, fault, tmp_path):
    data, message = FAULTS[fault]
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(SystemExit) as stop:
        example.main([str(path), "--output", str(tmp_path / "gpt")])
    assert str(stop.value).startswith("error: ")
    assert message in str(stop.value)
    assert [entry.name for entry in tmp_path.iterdir()] == (["text.txt"] if data is not None else [])


def test_other_faults_are_found_before_the_training(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "train", None)
    text, taken = tmp_path / "text.txt", tmp_path / "taken"
    text.write_text(lines(4000))
    taken.mkdir()
    (taken / "letter").write_text("dear")

    def refused(*command):
        with pytest.raises(SystemExit) as stop:
            example.main([str(text), *command])
        return f"{stop.value} {capsys.readouterr().err}"

    output = ["--output", str(tmp_path / "gpt")]
    assert "already exists" in refused("--output", str(taken))
    assert "was not made by Blockformer" in refused("--output", str(taken), "--force")
    assert "is there" in refused("--output", str(text), "--force")
    with pytest.raises(SystemExit, match="is inside it"):
        example.main([str(tmp_path), *output])
    assert "the prompt has 0 tokens" in refused(*output, "--prompt", "")
    assert "tokens: 1 to" in refused(*output, "--prompt", lines(500, seed=9))
    assert "invalid choice: 'bert'" in refused(*output, "--preset", "bert")
    assert "0 is not a number above 0" in refused(*output, "--minutes", "0")
    assert "nan is not" in refused(*output, "--learning-rate", "nan")
    assert "-1 is not 0 or more" in refused(*output, "--weight-decay", "-1")
    assert "0 is not 1 or more" in refused(*output, "--steps", "0")
    assert "invalid number value: 'x'" in refused(*output, "--temperatures", "x")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["taken", "text.txt"]
    assert (taken / "letter").read_text() == "dear"


def test_every_decoder_preset_makes_a_model(example, tiny_tokenizer):
    assert set(example.DECODERS) == {name for name in PRESETS if blockformer.preset(name).is_decoder}
    for preset in example.DECODERS:
        a_model = example.make_model(preset, tiny_tokenizer)
        ids = token_ids(2, example.CONTEXT)
        assert a_model(ids, labels=ids).loss.isfinite()
        assert a_model.config.norm_placement == blockformer.preset(preset).norm_placement


# What is shown


def test_a_smoothed_curve_looks_as_far_back_as_ahead(example):
    points = [(at, float(value)) for at, value in enumerate((4, 2, 0, 6, 5))]
    assert example.smoothed(points, 0) == points
    assert example.smoothed(points, 9) == [(0, 4.0), (1, 2.0), (2, 3.4), (3, pytest.approx(11 / 3)), (4, 5.0)]
    assert example.smoothed(points, 1)[2] == (2, pytest.approx(8 / 3))


def test_the_curve_in_words(example):
    curve = Curve(train=[(10, 4.0), (20, 2.0), (30, 1.0)], held_out=[(20, 3.5), (30, 2.5)])
    table = example.curve_table(curve)
    assert [list(column.cells) for column in table.columns] == [["20", "30"], ["3.000", "1.000"], ["3.500", "2.500"]]


def test_an_opening_is_the_first_words(example):
    assert example.opening("\n\n  short line\nmore") == "  short line"
    assert example.opening("one two three", most=9) == "one two"
    assert example.opening("x" * 100) == "x" * 60


# From start to end


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpt2", "qwen3"])
def test_a_gpt_is_trained_drawn_published_and_reloaded(preset, tmp_path, fresh, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    example = load_forking("train_gpt", fresh, tmp_path, monkeypatch)
    (tmp_path / "texts").mkdir()
    for at in range(20):
        (tmp_path / f"texts/{at}.txt").write_text(lines(100, seed=at))
    if preset == "qwen3":  # as if it were not installed
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder = tmp_path / "gpt"
    command = [str(tmp_path / "texts"), "--output", str(folder), "--preset", preset, "--steps", "12"]
    example.main([*command, "--temperatures", "0.7", "1.2", "--new-tokens", "8", "--prompt", "0003 "])
    output = capsys.readouterr().out
    for said in ("19 files", "unigram baseline", "12 steps", "greedy", "temperature 1.2, top-k 50", "the same greedy"):
        assert said in output
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["steps"] == 12
    assert figures["scores"]["trained model"]["loss"] < figures["scores"]["untrained model"]["loss"]
    assert (folder / "samples.txt").read_text().count("0003 ") >= 3
    assert (folder / "modeling_decoder.py").exists()
    if preset == "gpt2":
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert not (folder / "loss.png").exists()
        assert "no picture without matplotlib" in output
        assert "tokens trained on" in output
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["gpt", "texts"]


@pytest.mark.slow
def test_a_repo_that_writes_something_else_is_not_published(example, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(lines(1500))
    monkeypatch.setattr(example, "write_elsewhere", lambda repo, prompts, new_tokens: [""] * len(prompts))
    with pytest.raises(SystemExit, match="does not write what the trained one wrote"):
        example.main([str(tmp_path / "text.txt"), "--output", str(tmp_path / "gpt"), "--steps", "2"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.slow
def test_a_run_that_diverges_says_so(example, tmp_path):
    (tmp_path / "text.txt").write_text(lines(1500))
    command = [str(tmp_path / "text.txt"), "--output", str(tmp_path / "gpt"), "--steps", "6"]
    with pytest.raises(SystemExit, match="training diverged"):
        example.main([*command, "--learning-rate", "1e30"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.txt"]
