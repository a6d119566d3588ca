"""Checkpoints of training code without a class in transformers; the oracle computes each as its code publishes it."""

import struct

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


LLAMA2 = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "max_seq_len": 24}
INNER = 48


def llama2_c(shared=True):
    """Weights in llama2.c's layout, by the names of its state dict."""
    width, narrow = LLAMA2["dim"], LLAMA2["dim"] // 2
    sizes = {"attention.wq": (width, width), "attention.wk": (narrow, width), "attention.wv": (narrow, width)}
    sizes |= {"attention.wo": (width, width), "feed_forward.w1": (INNER, width), "feed_forward.w2": (width, INNER)}
    sizes |= {"feed_forward.w3": (INNER, width), "attention_norm": (width,), "ffn_norm": (width,)}
    names = {"tok_embeddings.weight": torch.randn(LLAMA2["vocab_size"], width) * 0.3}
    for layer in range(LLAMA2["n_layers"]):
        for name, shape in sizes.items():
            names[f"layers.{layer}.{name}.weight"] = torch.randn(shape) * 0.3 + (len(shape) == 1)
    names["norm.weight"] = 1 + torch.randn(width) * 0.3
    head = names["tok_embeddings.weight"] if shared else torch.randn(LLAMA2["vocab_size"], width) * 0.3
    return {**names, "output.weight": head}


def write_numbers(path, weights, shared):
    """The file that `run.c` reads: seven integers, then float32 numbers, each kind of all layers together."""
    sign = 1 if shared else -1
    header = (32, INNER, 2, 4, 2, sign * LLAMA2["vocab_size"], LLAMA2["max_seq_len"])
    order = ["attention_norm", *(f"attention.w{part}" for part in "qkvo"), "ffn_norm"]
    order += [f"feed_forward.w{number}" for number in (1, 2, 3)]
    parts = [weights["tok_embeddings.weight"]]
    parts += [weights[f"layers.{layer}.{name}.weight"] for name in order for layer in (0, 1)]
    parts += [weights["norm.weight"], torch.zeros(24, 4), torch.zeros(24, 4)]
    parts += [] if shared else [weights["output.weight"]]
    path.write_bytes(struct.pack("<7i", *header) + b"".join(part.numpy().tobytes() for part in parts))


def llama2_logits(weights, ids):
    """What a model of these weights computes: RMS norms, rotary pairs side by side as complex numbers, SwiGLU."""
    heads, size = LLAMA2["n_heads"], LLAMA2["dim"] // LLAMA2["n_heads"]

    def norm(name, states):
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]

    angles = torch.outer(torch.arange(ids.shape[1]), 10000.0 ** -(torch.arange(0, size, 2) / size))
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(states):  # [B, H, T, D]
        pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    states = weights["tok_embeddings.weight"][ids]
    for layer in range(LLAMA2["n_layers"]):
        at = f"layers.{layer}."
        read = norm(f"{at}attention_norm", states)
        q, k, v = (
            F.linear(read, weights[f"{at}attention.w{part}.weight"]).unflatten(-1, (-1, size)).transpose(1, 2)
            for part in "qkv"
        )
        k, v = (part.repeat_interleave(heads // LLAMA2["n_kv_heads"], dim=1) for part in (turned(k), v))
        mixed = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True).transpose(1, 2).flatten(2)
        states = states + F.linear(mixed, weights[f"{at}attention.wo.weight"])
        read = norm(f"{at}ffn_norm", states)
        gate, up = (F.linear(read, weights[f"{at}feed_forward.w{number}.weight"]) for number in (1, 3))
        states = states + F.linear(F.silu(gate) * up, weights[f"{at}feed_forward.w2.weight"])
    return norm("norm", states) @ weights["output.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("kind", ["ckpt.pt", "shared", "own head"])
def test_llama2_c(tmp_path, kind):
    weights = llama2_c(shared=kind != "own head")
    if kind == "ckpt.pt":
        source = tmp_path / "ckpt.pt"
        torch.save({"model": weights, "model_args": {**LLAMA2, "multiple_of": 16}, "iter_num": 5}, source)
    else:
        source = tmp_path / "model.bin"
        write_numbers(source, weights, shared=kind == "shared")
    assert "this is a checkpoint of llama2.c" in {each.sentence[:32] for each in diagnose(source).findings}
    mend(source, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_close(model(IDS).logits, llama2_logits(weights, IDS), 1e-5)


def test_a_file_of_numbers_with_one_too_few_is_not_taken_for_one(tmp_path):
    write_numbers(tmp_path / "model.bin", llama2_c(), shared=True)
    whole = (tmp_path / "model.bin").read_bytes()
    (tmp_path / "model.bin").write_bytes(whole[:-4])
    found = diagnose(tmp_path / "model.bin")
    assert [each.kind for each in found.findings] == ["file"]
    assert not found.is_mendable
