"""Repos that earlier states of this package wrote: `tests/museum/make.py` made them, by the code of then."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import blockformer
from blockformer.conversion import ConversionError
from blockformer.publishing import earlier_names

REPOS = sorted(path.parent for path in Path(__file__).parents[1].glob("museum/*/*/config.json"))
AUTO_CLASSES = {
    "blockformer_encoder": transformers.AutoModelForMaskedLM,
    "blockformer_decoder": transformers.AutoModelForCausalLM,
    "blockformer_encoder_decoder": transformers.AutoModelForSeq2SeqLM,
}


def auto_class(repo):
    return AUTO_CLASSES[json.loads((repo / "config.json").read_text())["model_type"]]


@torch.no_grad()
def assert_as_then(model, repo):
    """The logits that the code of then gave, to 1e-6 of the largest."""
    inputs = load_file(repo / "expected.safetensors")
    expected = inputs.pop("logits")
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def is_pooler(name):
    """Which a masked language model had then, and nothing read."""
    return ".pooler." in name


def test_there_are_repos():
    assert len(REPOS) == 6


@pytest.mark.parametrize("repo", REPOS, ids=lambda repo: repo.name)
def test_a_repo_of_then_gives_the_logits_of_then(repo, tmp_path):
    model = auto_class(repo).from_pretrained(repo)
    assert_as_then(model, repo)
    model.save_pretrained(tmp_path)
    names = earlier_names.renamed(load_file(repo / "model.safetensors"), model.config).keys()
    assert load_file(tmp_path / "model.safetensors").keys() == {name for name in names if not is_pooler(name)}
    assert not earlier_names.are_earlier(names)
    assert_as_then(auto_class(repo).from_pretrained(tmp_path), repo)


@pytest.mark.parametrize("repo", REPOS, ids=lambda repo: repo.name)
def test_a_state_dict_of_then_is_read_whole(repo):
    """As `Trainer` reads a checkpoint when it goes on: norms kept what they were drawn as, with a warning only."""
    config = AutoConfig.from_pretrained(repo)
    state = load_file(repo / "model.safetensors")
    model = auto_class(repo).from_config(config).eval()
    found = model.load_state_dict(state, strict=False)
    model.tie_weights()
    assert not [name for name in found.unexpected_keys if not is_pooler(name)]
    assert not [name for name in found.missing_keys if "norm" in name]
    assert_as_then(model, repo)
    assert_as_then(type(model).from_pretrained(None, config=config, state_dict=state).eval(), repo)


def test_weights_that_are_missing_are_still_refused(tmp_path):
    (repo,) = (repo for repo in REPOS if repo.name == "qwen3")
    tensors = load_file(repo / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((repo / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"missing(.|\n)*layers.1.self_attn_pre_norm"):
        auto_class(repo).from_pretrained(tmp_path)


def test_conversion_says_what_to_do_first(tmp_path):
    (repo,) = (repo for repo in REPOS if repo.name == "bert")
    with pytest.raises(ConversionError, match="save_pretrained"):
        blockformer.convert(repo, tmp_path / "official", to_official=True)
    auto_class(repo).from_pretrained(repo).save_pretrained(tmp_path / "saved")
    blockformer.convert(tmp_path / "saved", tmp_path / "official", to_official=True)
    inputs = load_file(repo / "expected.safetensors")
    with torch.no_grad():
        logits = transformers.BertForMaskedLM.from_pretrained(tmp_path / "official")(inputs["input_ids"]).logits
    torch.testing.assert_close(logits, inputs["logits"], rtol=1e-5, atol=1e-5)
