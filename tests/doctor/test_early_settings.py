"""Settings that the config classes refuse: as many types as layers, tokens of the vocabulary."""

import json

import pytest

from blockformer.conversion import ConversionError, convert
from blockformer.doctor import Options, diagnose, mend

from ..conversion.oracles import edit_config, entries_of, official_folder, stored

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1, "tie_word_embeddings": True}


@pytest.fixture
def source(tmp_path):
    official_folder(tmp_path / "source", "qwen3", tie_word_embeddings=False)
    return tmp_path / "source"


def sentences(found, *kinds):
    chosen = [each for each in found.findings if each.kind in kinds]
    return " ".join(" ".join(f"{each.severity} {each.sentence} | {each.remedy}" for each in chosen).split())


@pytest.mark.parametrize("types", [[FULL] * 4, [FULL]], ids=["more", "fewer"])
def test_equal_types_become_as_many_as_there_are_layers(tmp_path, source, types):
    wanted = stored(source)
    edit_config(source, layer_types=types)
    found = mend(source, tmp_path / "new")
    said = sentences(found, "config")
    assert f"error config.json: layer_types lists {len(types)} type" in said
    assert "and num_hidden_layers is 2; the tensors are of 2 layers" in said
    assert f'write "layer_types": ["{FULL}", "{FULL}"]' in said
    assert entries_of(tmp_path / "new")["layer_types"] == [FULL, FULL]
    assert stored(tmp_path / "new") == wanted


def test_the_number_of_layers_follows_the_tensors(tmp_path, source):
    edit_config(source, num_hidden_layers=3)
    found = mend(source, tmp_path / "new")
    assert 'write "num_hidden_layers": 2' in sentences(found, "config")
    assert entries_of(tmp_path / "new")["num_hidden_layers"] == 2


def test_types_that_differ_are_asked_for(tmp_path, source):
    edit_config(source, layer_types=[SLIDING, FULL, SLIDING], use_sliding_window=True, sliding_window=4)
    found = diagnose(source)
    assert "write one type for each layer, --set layer_types='[...]'" in sentences(found, "layer-types")
    assert not found.is_mendable
    assert sentences(found, "missing", "unknown", "shapes") == ""
    with pytest.raises(ConversionError, match="this must be settled first"):
        mend(source, tmp_path / "new")
    with pytest.raises(ConversionError, match="layer_types lists 3 types, and num_hidden_layers is 2"):
        convert(source, tmp_path / "new")
    types = [SLIDING, FULL]
    mend(source, tmp_path / "new", options=Options(settings={"layer_types": types}))
    assert entries_of(tmp_path / "new")["layer_types"] == types


@pytest.mark.parametrize(
    ("entry", "value"),
    [("eos_token_id", 5000), ("bos_token_id", 199), ("pad_token_id", 200), ("eos_token_id", [2, 999])],
)
def test_a_token_beyond_the_vocabulary(tmp_path, source, entry, value):
    edit_config(source, **{entry: value})
    found = diagnose(source)
    said = sentences(found, "token-id")
    assert f"error config.json: {entry} is {json.dumps(value)}, and the vocabulary has 199 tokens, up to id 198" in said
    assert f"write the id that the tokenizer has, or null, --set {entry}=ID" in said
    assert not found.is_mendable
    assert sentences(found, "missing", "unknown", "shapes", "config") == ""
    with pytest.raises(ConversionError, match=f"{entry} must be a token from 0 to 198.*Write the id"):
        convert(source, tmp_path / "new")
    mend(source, tmp_path / "new", options=Options(settings={entry: 7}))
    assert entries_of(tmp_path / "new")[entry] == 7


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo"])
def test_what_the_class_has_by_default_is_no_error(tmp_path, family):
    """Such files convert as they are."""
    layers = {"attention_types": [[["global"], 2]], "num_layers": 2} if family == "gpt_neo" else {}
    official_folder(tmp_path / "source", family, bos_token_id=50256, eos_token_id=50256, **layers)
    (tmp_path / "source/generation_config.json").unlink()
    found = diagnose(tmp_path / "source")
    assert "warning config.json: bos_token_id is 50256, and the vocabulary has" in sentences(found, "token-id")
    assert found.status == 3
    assert convert(tmp_path / "source", tmp_path / "ours", verify="quick").parity.passed
    edit_config(tmp_path / "source", bos_token_id=5000)
    assert "error config.json: bos_token_id is 5000" in sentences(diagnose(tmp_path / "source"), "token-id")


def test_the_tokenizer_knows_which_token_is_meant(tmp_path, tiny_tokenizer):
    official_folder(tmp_path / "source", "qwen3", tokenizer=tiny_tokenizer, **SIZES)
    edit_config(tmp_path / "source", eos_token_id=151645)
    found = mend(tmp_path / "source", tmp_path / "new")
    assert "write \"eos_token_id\": 0, the id of '<|end|>' in the tokenizer" in sentences(found, "token-id")
    assert entries_of(tmp_path / "new")["eos_token_id"] == 0


def test_a_token_of_the_vocabulary_that_the_tensors_have(tmp_path, source):
    edit_config(source, vocab_size=90, eos_token_id=150)
    found = mend(source, tmp_path / "new")
    assert sentences(found, "token-id") == ""
    assert 'write "vocab_size": 199' in sentences(found, "config")
    entries = entries_of(tmp_path / "new")
    assert (entries["vocab_size"], entries["eos_token_id"]) == (199, 150)
