"""nanochat's checkpoints in and out. It is on no package registry: the weights are written by a program of this file,
and the oracle computes them by the formulas that its first version publishes."""

import json

import pytest
import torch
import transformers
from own_codes import IDS
from pairs import assert_close
from torch.nn import functional as F

from blockformer.conversion import ConversionError
from blockformer.doctor import diagnose, mend, write_for
from blockformer.doctor.reading_in import convert_own_code

SETTINGS = {"sequence_len": 64, "vocab_size": 67, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32}


def nanochat():
    """Weights in nanochat's layout, large enough that the soft cap counts."""
    width, narrow = 32, 16
    sizes = {"attn.c_q": (width, width), "attn.c_k": (narrow, width), "attn.c_v": (narrow, width)}
    sizes |= {"attn.c_proj": (width, width), "mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width)}
    names = {"transformer.wte.weight": torch.randn(67, width), "lm_head.weight": torch.randn(67, width) * 2}
    for layer in range(2):
        names |= {f"transformer.h.{layer}.{name}.weight": torch.randn(shape) * 0.3 for name, shape in sizes.items()}
    return names


def logits_of(weights, ids):
    """Norms without factors, the rotation before the norm of queries and keys and the other way round, ReLU squared."""

    def norm(states):
        return F.rms_norm(states, states.shape[-1:])

    size = SETTINGS["n_embd"] // SETTINGS["n_head"]
    angles = torch.outer(torch.arange(ids.shape[1]).float(), 10000.0 ** -(torch.arange(0, size, 2) / size))
    cos, sin = angles.cos(), angles.sin()

    def turned(states):  # [B, H, T, D]
        first, second = states.chunk(2, dim=-1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)

    states = norm(weights["transformer.wte.weight"][ids])
    for layer in range(SETTINGS["n_layer"]):
        at = f"transformer.h.{layer}."
        read = norm(states)
        q, k, v = (
            F.linear(read, weights[f"{at}attn.c_{part}.weight"]).unflatten(-1, (-1, size)).transpose(1, 2)
            for part in "qkv"
        )
        k, v = (part.repeat_interleave(2, dim=1) for part in (norm(turned(k)), v))
        mixed = F.scaled_dot_product_attention(norm(turned(q)), k, v, is_causal=True).transpose(1, 2).flatten(2)
        states = states + F.linear(mixed, weights[f"{at}attn.c_proj.weight"])
        inner = F.relu(F.linear(norm(states), weights[f"{at}mlp.c_fc.weight"])).square()
        states = states + F.linear(inner, weights[f"{at}mlp.c_proj.weight"])
    return 15 * torch.tanh(F.linear(norm(states), weights["lm_head.weight"]) / 15)


def save(folder, weights, **changed):
    folder.mkdir()
    torch.save(weights, folder / "model_000650.pt")
    torch.save({"state": {}}, folder / "optim_000650_rank0.pt")
    meta = {"step": 650, "val_bpb": 0.9, "model_config": {**SETTINGS, **changed}}
    (folder / "meta_000650.json").write_text(json.dumps(meta))
    return folder


@torch.no_grad()
@pytest.mark.parametrize("how", ["mended", "converted"])
def test_it_comes_in_and_goes_out(tmp_path, how):
    weights = nanochat()
    source = save(tmp_path / "d2", weights)
    if how == "mended":
        said = next(each for each in diagnose(source).findings if each.kind == "own-code")
        assert said.sentence == "this is a checkpoint of nanochat, which no library loads"
        mend(source, tmp_path / "out")
    else:
        report = convert_own_code(source, tmp_path / "out")
        assert report.notes[0] == "a checkpoint of nanochat, read as BlockformerDecoderForCausalLM"
        assert "auto_map" in (tmp_path / "out/config.json").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    wanted = logits_of(weights, IDS)
    assert wanted.abs().max() > 5
    assert_close(model(IDS).logits, wanted, 1e-5)
    write_for(tmp_path / "out", tmp_path / "again", "nanochat")
    written = torch.load(tmp_path / "again/model_000000.pt", weights_only=True)
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    assert json.loads((tmp_path / "again/meta_000000.json").read_text())["model_config"] == SETTINGS


@pytest.mark.parametrize(
    ("more", "changed", "said"),
    [
        ({"value_embeds.1.weight": torch.ones(67, 16)}, {}, "it has value embeddings"),
        ({"transformer.h.1.attn.ve_gate.weight": torch.ones(2, 32)}, {}, "it has value embeddings"),
        ({"resid_lambdas": torch.ones(2)}, {}, "it has learned factors of the residual stream"),
        ({"smear_lambda": torch.ones(1)}, {}, "it has a share of the token before (smear)"),
        ({"backout_lambda": torch.ones(1)}, {}, "it has a middle layer's states taken out again (backout)"),
        ({}, {"window_pattern": "SSSL"}, "window_pattern is 'SSSL'"),
        ({}, {"n_head": None}, "its meta_*.json lacks 'n_head'"),
    ],
)
def test_later_versions_are_refused_by_what_they_add(tmp_path, more, changed, said):
    source = save(tmp_path / "d2", {**nanochat(), **more}, **changed)
    with pytest.raises(ConversionError) as caught:
        mend(source, tmp_path / "out")
    assert said in str(caught.value)


def test_without_its_settings(tmp_path):
    source = save(tmp_path / "d2", nanochat())
    (source / "meta_000650.json").unlink()
    with pytest.raises(ConversionError, match=r"meta_000650\.json with its settings is missing"):
        mend(source, tmp_path / "out")
    (source / "meta_000650.json").write_text('{"model_config": {"n_head"')
    with pytest.raises(ConversionError, match="not valid JSON"):
        mend(source, tmp_path / "out")


def test_a_norm_with_weights_is_not_written(tmp_path):
    mend(save(tmp_path / "d2", nanochat()), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    with torch.no_grad():
        model.model.norm.weight[3] = 2.0
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(ConversionError, match=r"no place for weights of this model:\n.*model\.norm\.weight"):
        write_for(tmp_path / "trained", tmp_path / "again", "nanochat")
