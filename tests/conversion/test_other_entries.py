"""Entries of `config.json` that only other libraries read stay in it through every door; so does what outputs hold."""

import copy
import json

import pytest
import torch

import blockformer
from blockformer.conversion import convert, export_folder, from_official
from blockformer.conversion.reshaped import convert_reshaped

from .oracles import assert_verified, edit_config, entries_of, official_folder

ACTIVATION = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.1.0"}
OTHERS = {
    "sentence_transformers": ACTIVATION,
    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    "task_specific_params": {"summarization": {"max_length": 128}},
    "prompts": {"query": "query: "},
    "matryoshka_dimensions": [16, 32],
    "is_matryoshka": True,
    "x_of_another_tool": None,
    "transformers.js_config": {"dtype": "q4"},
}
CODE = {
    "custom_pipelines": {"mine": {"impl": "mine.Pipeline"}},
    "sentence_transformers": {"activation_fn": "os.system"},
    "sbert_ce_default_activation_function": "mine.Activation",
    "of_a_tool": {"inside": {"auto_map": {"AutoModel": "mine.Model"}}},
}
LOAD_AND_SAVE = """
import sys, json
from transformers import AutoConfig, AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
config = AutoConfig.from_pretrained(sys.argv[2], trust_remote_code=True)
print(json.dumps({name: getattr(config, name) for name in json.loads(sys.argv[3])}))
"""


def others_of(folder, wanted=OTHERS):
    """The entries of a folder's config, checked to be those of `wanted` in the record, too."""
    entries = entries_of(folder)
    return {name: entries[name] for name in wanted if name in entries}


@pytest.fixture
def source(tmp_path):
    official_folder(tmp_path / "src", "bert", "BertForSequenceClassification", num_labels=1)
    edit_config(tmp_path / "src", **OTHERS)
    return tmp_path / "src"


def test_they_come_through_every_door(tmp_path, source, fresh):
    report = convert(source, tmp_path / "dst")
    kept = [note for note in report.notes if "kept in config.json, for other libraries" in note]
    assert len(kept) == 1
    assert all(f"'{name}'" in kept[0] for name in OTHERS)
    export_folder(tmp_path / "dst", tmp_path / "exported")
    from_official(source).save_pretrained(tmp_path / "saved")
    blockformer.BlockformerEncoderForSequenceClassification.from_pretrained(tmp_path / "dst").save_pretrained(
        tmp_path / "again"
    )
    blockformer.upgrade(tmp_path / "exported")
    found = fresh(LOAD_AND_SAVE, tmp_path / "dst", tmp_path / "fresh", json.dumps([*OTHERS]), folder=tmp_path)
    assert json.loads(found) == OTHERS
    for name in ("dst", "exported", "saved", "again", "fresh"):
        assert others_of(tmp_path / name) == OTHERS, name
        assert blockformer.verify(tmp_path / name).is_ok
        convert(tmp_path / name, tmp_path / f"{name}-back", to_official=True)
        assert others_of(tmp_path / f"{name}-back") == OTHERS, name
    assert entries_of(tmp_path / "dst-back") == entries_of(source)


def test_a_model_of_another_shape_keeps_them(tmp_path):
    official_folder(tmp_path / "src", "qwen3")
    edit_config(tmp_path / "src", **OTHERS)
    convert_reshaped(tmp_path / "src", tmp_path / "dst", layers=[0])
    assert others_of(tmp_path / "dst") == OTHERS
    assert blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst").config.prompts


def test_what_was_changed_or_added_goes_back(tmp_path, source):
    convert(source, tmp_path / "dst", verify=False)
    model = blockformer.BlockformerEncoderForSequenceClassification.from_pretrained(tmp_path / "dst")
    model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    model.config.added = 3
    model.save_pretrained(tmp_path / "again")
    (tmp_path / "dst/conversion.json").rename(tmp_path / "again/conversion.json")
    for _ in range(2):  # with the record of the conversion, and without
        back = tmp_path / "back"
        convert(tmp_path / "again", back, to_official=True, verify=False, force=True)
        assert entries_of(back)["sentence_transformers"] == model.config.sentence_transformers
        assert entries_of(back)["added"] == 3
        assert entries_of(back)["prompts"] == OTHERS["prompts"]
        (tmp_path / "again/conversion.json").unlink(missing_ok=True)


def test_those_that_name_code_are_not_in_ours_and_come_back(tmp_path, source):
    edit_config(source, **(dict.fromkeys(OTHERS, ...) | CODE))
    report = convert(source, tmp_path / "dst", verify=False)
    assert not others_of(tmp_path / "dst", CODE)
    assert "other_entries" not in entries_of(tmp_path / "dst")
    note = next(note for note in report.notes if "does not use" in note)
    assert all(f"'{name}'" in note for name in CODE)
    assert "kept" not in note
    assert blockformer.verify(tmp_path / "dst").is_ok
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert entries_of(tmp_path / "back") == entries_of(source)


def test_those_that_ours_would_follow_are_not_in_ours(tmp_path, source):
    """Fields of any topology of ours, parts of the class, and what transformers takes for a model's settings."""
    followed = {"num_experts": 4, "norm_type": "rms", "kv_lora_rank": 8, "head_dropout": 0.3}
    followed |= {"text_config": {"hidden_size": 8}, "other_entries": ["hidden_size"], "_own": 1}
    edit_config(source, **(dict.fromkeys(OTHERS, ...) | followed))
    plain = copy.deepcopy(entries_of(source))
    convert(source, tmp_path / "dst")
    entries = entries_of(tmp_path / "dst")
    assert not [name for name, value in followed.items() if entries.get(name) == value]
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert entries_of(tmp_path / "back") == plain


@pytest.mark.parametrize(
    ("family", "name"), [("bert", "BertForTokenClassification"), ("qwen3", None), ("t5", None), ("bart", None)]
)
def test_what_an_output_holds_is_carried(tmp_path, family, name):
    """transformers' own decoders fail where `return_dict` is false, and are compared all the same."""
    official_folder(tmp_path / "src", family, name)
    shown = {"output_attentions": True, "output_hidden_states": True, "return_dict": False}
    edit_config(tmp_path / "src", **shown)
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert_verified(report)
    ids = {"input_ids": torch.tensor([[4, 5, 6, 7]])}
    if family == "t5":
        ids["decoder_input_ids"] = ids["input_ids"]
    for model in (from_official(tmp_path / "src"), from_official(tmp_path / "dst", attn_implementation="eager")):
        config = model.config
        assert {entry: getattr(config, entry) for entry in shown} == shown
        assert isinstance(model(**ids), tuple)
    output = model(**ids, return_dict=True)
    attentions = output.decoder_attentions if config.is_encoder_decoder else output.attentions
    assert len(attentions) == config.get_text_config(decoder=True).num_hidden_layers
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert others_of(tmp_path / "back", shown) == shown


def test_a_misspelt_field_is_refused_unless_it_is_named_as_another_s():
    cls = blockformer.BlockformerEncoderConfig
    with pytest.raises(ValueError, match=r"has no field 'hidden_sise'\. Did you mean 'hidden_size'\?"):
        cls(hidden_sise=64, other_entries=["prompts"], prompts={})
    with pytest.raises(ValueError, match="other_entries must be a list of names, not 3"):
        cls(other_entries=3)
    config = cls(prompts={"query": "q"}, other_entries=["prompts", "gone"])
    assert config.to_dict()["other_entries"] == ["prompts"]
    del config.prompts
    assert config.to_dict()["other_entries"] is None
