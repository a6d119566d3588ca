"""A language model that judges pairs as a classifier: the same scores, in sentence-transformers too, and back."""

import json

import numpy as np
import page_blocks
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import blockformer
from blockformer.cli import main
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.for_search import convert_for_search
from blockformer.conversion.reshaped import convert_reshaped

from .oracles import stored
from .search_models import CHAT, TEMPLATE, WORDS, decoder

PAIRS = [("why is the sky blue", "Air scatters"), ("cheap trains", "Turin lies on the river Po.")]
NO, YES = WORDS.index("no"), WORDS.index("yes")


def reranker(tmp_path, tokens=("no", "yes"), **given):
    return convert_for_search(tmp_path / "src", tmp_path / "dst", use="reranker", tokens=tokens, **given)


def differences(model, rows):
    """The official scores: the logit of yes less that of no after the last token of each row."""
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row])).logits[0, -1].float() for row in rows]
    return np.array([(each[YES] - each[NO]).item() for each in logits])


def rendered(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [[{"role": "query", "content": one}, {"role": "document", "content": two}] for one, two in PAIRS]
    return [tokenizer.apply_chat_template(each, tokenize=True, return_dict=True)["input_ids"] for each in messages]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("Qwen3", torch.bfloat16), ("Granite", torch.float32), ("Gemma", torch.float32)]
)
def test_scores_there_and_everything_back(tmp_path, kind, dtype):
    model = decoder(tmp_path / "src", kind, dtype=dtype)
    report = reranker(tmp_path)
    assert "float32: largest difference of scores at 200 pairs" in str(report.parity)
    assert report.parity.passed
    made = blockformer.BlockformerDecoderForSequenceClassification.from_pretrained(tmp_path / "dst", dtype="float32")
    expected = differences(model, rendered(tmp_path / "src"))
    found = [made(input_ids=torch.tensor([row])).logits.item() for row in rendered(tmp_path / "dst")]
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, abs(expected).max()))
    assert abs(expected[0] - expected[1]) > 1e-3
    assert blockformer.verify(tmp_path / "dst").problems == {}
    assert load_file(tmp_path / "dst/model.safetensors")["score.weight"].dtype is torch.float32

    convert_reshaped(tmp_path / "dst", tmp_path / "ours", topology="decoder")
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    convert(tmp_path / "src", tmp_path / "direct", verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    names = {path.name for path in (tmp_path / "src").iterdir()}
    assert names == {path.name for path in (tmp_path / "back").iterdir()} - {".blockformer.json"}
    for name in names - {"model.safetensors"}:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "src" / name).read_bytes(), name
    assert (tmp_path / "ours/config.json").read_bytes() == (tmp_path / "direct/config.json").read_bytes()


def test_the_block_of_the_page_scores_a_pair(tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    decoder("src")
    convert_for_search("src", "reranker", use="reranker", tokens=("no", "yes"))
    names = page_blocks.run("retrieval.md", "import CrossEncoder")
    pair = ("How do I keep bread fresh?", "Wrap the loaf in a cloth.")
    assert 0 < names["reranker"].predict([pair]).item() < 1


@pytest.mark.parametrize("template", [TEMPLATE, CHAT, None])
def test_cross_encoders_open_it_and_its_official_form(tmp_path, template):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = decoder(tmp_path / "src", template=template)
    report = reranker(tmp_path)
    assert any("no chat template formats pairs" in note for note in report.notes) == (template != TEMPLATE)
    convert(tmp_path / "dst", tmp_path / "official", to_official=True)
    if template == TEMPLATE:
        rows = rendered(tmp_path / "src")
        theirs = sentence_transformers.CrossEncoder(str(tmp_path / "src"), device="cpu").predict(PAIRS)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "src")
        rows = [tokenizer(*pair)["input_ids"] for pair in PAIRS]
    expected = 1 / (1 + np.exp(-differences(model, rows)))
    for folder in ("dst", "official"):
        opened = sentence_transformers.CrossEncoder(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        assert type(opened.model).__name__.endswith("ForSequenceClassification")
        np.testing.assert_allclose(opened.predict(PAIRS), expected, atol=1e-5)
    if template == TEMPLATE:
        np.testing.assert_allclose(theirs, expected, atol=1e-5)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "official").config.pad_token_id == 0


def test_settings_of_the_language_model_in_sentence_transformers_come_back(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    decoder(tmp_path / "plain")
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "plain"), device="cpu", prompts={"web": "judge"})
    theirs.set_keep_in_fp32_modules(["0.model.lm_head"])
    theirs.save_pretrained(str(tmp_path / "src"))
    assert "LogitScore" in (tmp_path / "src/modules.json").read_text()
    reranker(tmp_path)
    ours = sentence_transformers.CrossEncoder(str(tmp_path / "dst"), device="cpu", trust_remote_code=True)
    assert [type(each).__name__ for each in ours] == ["Transformer"]
    assert ours.prompts == {"web": "judge"}
    np.testing.assert_allclose(ours.predict(PAIRS), theirs.predict(PAIRS), atol=1e-5)
    convert_reshaped(tmp_path / "dst", tmp_path / "ours", topology="decoder")
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    for path in (tmp_path / "src").rglob("*.json"):
        assert (tmp_path / "back" / path.relative_to(tmp_path / "src")).read_bytes() == path.read_bytes(), path.name


def test_one_token_and_a_template_of_its_own(tmp_path):
    model = decoder(tmp_path / "src", "Gemma", template=None)
    (tmp_path / "pairs.jinja").write_text(TEMPLATE)
    report = reranker(tmp_path, tokens=["yes"], template=tmp_path / "pairs.jinja")
    assert report.parity.passed
    assert AutoTokenizer.from_pretrained(tmp_path / "dst").chat_template == TEMPLATE
    made = blockformer.BlockformerDecoderForSequenceClassification.from_pretrained(tmp_path / "dst")
    for row in rendered(tmp_path / "dst"):
        ids = torch.tensor([row])
        torch.testing.assert_close(made(ids).logits[0], model(ids).logits[0, -1, [YES]], atol=1e-4, rtol=1e-5)
    convert_reshaped(tmp_path / "dst", tmp_path / "ours", topology="decoder")
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").chat_template is None


def test_of_a_repo_of_ours_and_from_the_command_line(tmp_path, capsys):
    decoder(tmp_path / "official")
    convert(tmp_path / "official", tmp_path / "src", verify=False)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--as", "reranker", "--tokens", "no,yes"])
    told = capsys.readouterr()
    assert not ended.value.code, told.err
    assert "a self-contained repo of a reranker" in told.out
    assert "scores at 200 pairs" in told.out
    assert "`yes` minus that of `no`" in (tmp_path / "dst/README.md").read_text()
    blockformer.conversion.export_folder(tmp_path / "dst", tmp_path / "exported")
    convert_reshaped(tmp_path / "exported", tmp_path / "again", topology="decoder")
    convert(tmp_path / "again", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "official")
    assert json.loads((tmp_path / "again/config.json").read_text()) == json.loads(
        (tmp_path / "src/config.json").read_text()
    )


def test_a_cast_is_made_before_the_difference(tmp_path):
    decoder(tmp_path / "src")
    report = reranker(tmp_path, dtype="bfloat16", verify="quick")
    assert report.parity.passed
    assert report.parity.measured[0].max_difference < report.parity.measured[0].limit / 2
    weights = load_file(tmp_path / "dst/model.safetensors")
    assert {each.dtype for name, each in weights.items() if name != "score.weight"} == {torch.bfloat16}
    rows = weights["model.embed_tokens.weight"][[NO, YES]].float()
    assert torch.equal(weights["score.weight"], rows[1:] - rows[:1])


def test_a_tied_head_that_is_stored_as_well_comes_back(tmp_path):
    decoder(tmp_path / "src")
    path = tmp_path / "src/model.safetensors"
    weights = load_file(path)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    report = reranker(tmp_path, verify="quick")
    assert not any("no way back" in note for note in report.notes)
    convert_reshaped(tmp_path / "dst", tmp_path / "ours", topology="decoder")
    convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify=False)
    assert "lm_head.weight" in load_file(tmp_path / "back/model.safetensors")
    assert stored(tmp_path / "back") == stored(tmp_path / "src")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("record.json", None, "a file that the way back needs is not here; download the whole repo first"),
        ("record.json", "{}", "damaged; convert the first source again"),
        ("record.json", '{"written": {"../x": "0"}}', "damaged; convert the first source again"),
        ("config.json", "{", "config.json"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, name, content, named):
    decoder(tmp_path / "src")
    reranker(tmp_path, verify=False)
    path = tmp_path / "dst/conversion/before" / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConversionError, match=named):
        convert_reshaped(tmp_path / "dst", tmp_path / "back", topology="decoder")
    assert not (tmp_path / "back").exists()


def test_an_untied_head_says_that_there_is_no_way_back(tmp_path):
    decoder(tmp_path / "src", tie_word_embeddings=False)
    report = reranker(tmp_path, verify="quick")
    assert report.parity.measured[0].positions == 20
    assert any("this cannot be undone: keep the source" in note for note in report.notes)
    with pytest.raises(ConversionError, match=r"head is not here, .* not tied to it; convert the first source again"):
        convert_reshaped(tmp_path / "dst", tmp_path / "back", topology="decoder")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("settings", "tokens", "named"),
    [
        ({}, ["no", "maybe"], "'maybe' is not one token of the tokenizer, which reads it as '<unk>'"),
        ({}, ["no", "no"], "'no' and 'no' are the same token"),
        ({"kind": "Gemma2"}, ["no", "yes"], "final_logit_softcapping is 30.0"),
        ({"task": "ForSequenceClassification"}, ["no", "yes"], "made from a decoder that generates text"),
    ],
)
def test_what_cannot_be_a_reranker_is_refused(tmp_path, settings, tokens, named):
    decoder(tmp_path / "src", **settings)
    with pytest.raises(ConversionError, match=named):
        reranker(tmp_path, tokens=tokens)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--as", "reranker"], "tokens are missing; use"),
        (["--as", "reranker", "--tokens", "a,b,c"], "tokens must be two tokens"),
        (["--as", "reranker", "--tokens", "no,yes", "--layers", "0"], "--layers cannot be combined with --as reranker"),
        (["--as", "reranker", "--tokens", "no,yes", "--to", "official"], "cannot be combined with --to official"),
        (["--as", "reranker", "--tokens", "no,yes", "--template", "none.jinja"], "none.jinja: no such file"),
        (["--tokens", "no,yes"], "--tokens is for --as reranker"),
        (["--as", "embedder", "--tokens", "no,yes"], "tokens is an option of --as reranker"),
        (["--as", "embedder", "--prompt", "query"], "--prompt must be NAME=TEXT"),
        (["--as", "embedder", "--pooling", "max"], "pooling must be one of mean, lasttoken"),
    ],
)
def test_wrong_command_lines_leave_nothing(tmp_path, capsys, arguments, named):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "src"), str(tmp_path / "dst"), *arguments])
    assert ended.value.code
    assert named in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "dst").exists()
