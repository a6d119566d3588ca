"""Decoders that see a text whole: from padding to the published repo, and what they refuse."""

import copy
import json

import pytest
import torch
from pairs import assert_close
from sizes import STRONG
from transformers import DynamicCache

import blockformer
from blockformer import preset
from blockformer.cli.text import load_writer
from blockformer.conversion import ConversionError
from blockformer.page.making import page_of
from blockformer.pictures.anatomy import anatomy

FAMILIES = ("qwen3", "gpt2", "mistral", "gemma2", "bloom", "gpt_oss", "mixtral")


def make(family="qwen3", head="Model", **settings):
    torch.manual_seed(0)
    config = preset(family, **{**STRONG, "bidirectional": True, **settings})
    return getattr(blockformer, f"BlockformerDecoder{head}")(config).eval()


def batch(rows=3, length=11):
    ids = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padding_changes_nothing_and_later_tokens_do(family):
    model, given = make(family), batch()
    states = model(**given).last_hidden_state
    for row in range(3):
        alone = model(given["input_ids"][row : row + 1, 2 * row :]).last_hidden_state
        assert_close(states[row : row + 1, 2 * row :], alone)
    changed = {**given, "input_ids": given["input_ids"].clone()}
    changed["input_ids"][:, -1] += 1
    assert (model(**changed).last_hidden_state[:, -3] - states[:, -3]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@torch.no_grad()
def test_backends_and_fast_ways_agree(family):
    model, given = make(family), batch()
    real, expected = given["attention_mask"].bool(), None
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        found = model(**given).last_hidden_state[real]
        expected = found if expected is None else expected
        assert_close(found, expected)
    assert_close(copy.deepcopy(model).prepare_for_inference()(**given).last_hidden_state[real], expected)


def test_it_keeps_no_cache_and_writes_no_text():
    model, given = make(head="ForCausalLM"), batch()
    assert model(**given, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match=r"past_key_values needs causal layers; .*: pass the whole text"):
        model(**given, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="generate needs bidirectional=False"):
        model.generate(**given)


def test_it_trains():
    model, given = make(head="ForCausalLM").train(), batch()
    model(**given, labels=given["input_ids"]).loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_its_repo_says_so_and_is_read_by_its_own_code(tmp_path, fresh, tiny_tokenizer):
    model, given = make(head="ForCausalLM", vocab_size=len(tiny_tokenizer)), batch()
    with torch.no_grad():
        expected = model(**given).logits
    blockformer.export_model(model, tmp_path / "repo", tokenizer=tiny_tokenizer)
    assert json.loads((tmp_path / "repo" / "config.json").read_text())["bidirectional"] is True
    card = (tmp_path / "repo" / "README.md").read_text()
    assert "generate" not in card.split("## ")[1]
    torch.save((given, expected), tmp_path / "seen.pt")
    code = """
import sys, torch, transformers
given, expected = torch.load(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    real = given['attention_mask'].bool()
    print(torch.allclose(model(**given).logits[real], expected[real], rtol=1e-4, atol=1e-4))
"""
    assert fresh(code, tmp_path / "repo", tmp_path / "seen.pt", folder=tmp_path) == "True"
    with pytest.raises(ConversionError, match="bidirectional, so it cannot generate text"):
        load_writer(str(tmp_path / "repo"), None, None)


def test_a_causal_config_does_not_name_it(tmp_path):
    preset("qwen3", **STRONG).save_pretrained(tmp_path)
    assert "bidirectional" not in json.loads((tmp_path / "config.json").read_text())


def test_its_page_shows_what_a_token_sees(tmp_path):
    model = make(head="ForCausalLM")
    (kind,) = {layer.sublayers[0].f.mask for stack in anatomy(model).stacks for layer in stack.kinds}
    assert kind == "both"
    model.save_pretrained(tmp_path)
    assert "bidirectional" in page_of(str(tmp_path))
