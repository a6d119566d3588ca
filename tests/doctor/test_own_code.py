"""Checkpoints of training code without a class in transformers; the oracle computes each as its code publishes it."""

import pytest
import torch
import transformers
from pairs import assert_close
from torch.nn import functional as F

from blockformer.conversion import ConversionError, convert
from blockformer.doctor import diagnose, mend

IDS = torch.arange(3, 19)[None]
NANO = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 65, "dropout": 0.1}


def nano_gpt(bias):
    """Weights in nanoGPT's layout: names, shapes and the buffer of the causal mask."""
    width, names = NANO["n_embd"], {}
    names["transformer.wte.weight"] = torch.randn(NANO["vocab_size"], width) * 0.3
    names["transformer.wpe.weight"] = torch.randn(NANO["block_size"], width) * 0.3
    for layer in range(NANO["n_layer"]):
        start = f"transformer.h.{layer}."
        sizes = {"attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}
        for name, (rows, columns) in sizes.items():
            names[f"{start}{name}.weight"] = torch.randn(rows * width, columns * width) * 0.3
            names |= {f"{start}{name}.bias": torch.randn(rows * width) * 0.3} if bias else {}
        names[f"{start}attn.bias"] = torch.ones(1, 1, 24, 24).tril()
        for name in ("ln_1", "ln_2"):
            names[f"{start}{name}.weight"] = 1 + torch.randn(width) * 0.3
            names |= {f"{start}{name}.bias": torch.randn(width) * 0.3} if bias else {}
    names["transformer.ln_f.weight"] = 1 + torch.randn(width) * 0.3
    names |= {"transformer.ln_f.bias": torch.randn(width) * 0.3} if bias else {}
    return {**names, "lm_head.weight": names["transformer.wte.weight"]}


def nano_logits(weights, ids):
    """What a model of these weights computes, by the formulas of GPT-2 with an exact GELU."""

    def linear(name, states):
        return F.linear(states, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name, states):
        return F.layer_norm(states, states.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"), 1e-5)

    states = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][: ids.shape[1]]
    for layer in range(NANO["n_layer"]):
        start = f"transformer.h.{layer}."
        parts = linear(f"{start}attn.c_attn", norm(f"{start}ln_1", states)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (NANO["n_head"], -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        states = states + linear(f"{start}attn.c_proj", mixed)
        inner = F.gelu(linear(f"{start}mlp.c_fc", norm(f"{start}ln_2", states)))
        states = states + linear(f"{start}mlp.c_proj", inner)
    return norm("transformer.ln_f", states) @ weights["lm_head.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nano_gpt(tmp_path, bias, prefix):
    weights = nano_gpt(bias)
    (tmp_path / "run").mkdir()
    saved = {"model": {prefix + name: each for name, each in weights.items()}, "model_args": {**NANO, "bias": bias}}
    saved |= {"iter_num": 5, "config": {"batch_size": 12}, "optimizer": {"state": {}}}
    torch.save(saved, tmp_path / "run/ckpt.pt")
        {**saved, "iter_num": 5, "config": {"batch_size": 12}, "optimizer": {"state": {}}}, tmp_path / "run/ckpt.pt"
    )
    found = diagnose(tmp_path / "run/ckpt.pt")
    said = next(each for each in found.findings if each.kind == "own-code")
    assert said.sentence == "this is a checkpoint of nanoGPT, which no library loads"
    assert said.remedy == "--mend writes it as GPT2LMHeadModel, which computes the same"
    mend(tmp_path / "run", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_close(model(IDS).logits, nano_logits(weights, IDS), 1e-5)
    assert diagnose(tmp_path / "out", quick=True).status == 0
    convert(tmp_path / "out", tmp_path / "ours")


def test_nano_gpt_without_its_settings(tmp_path):
    torch.save({"model": nano_gpt(True), "model_args": {**NANO, "n_head": "4"}}, tmp_path / "ckpt.pt")
    found = diagnose(tmp_path / "ckpt.pt")
    assert any("its model_args lacks 'n_head'" in each.remedy for each in found.findings)
    with pytest.raises(ConversionError, match="its model_args lacks 'n_head'"):
        mend(tmp_path / "ckpt.pt", tmp_path / "out")
    torch.save({"model": nano_gpt(True), "model_args": {**NANO, "n_layer": 3}}, tmp_path / "ckpt.pt")
    with pytest.raises(ConversionError, match="not mended"):
        mend(tmp_path / "ckpt.pt", tmp_path / "out")
