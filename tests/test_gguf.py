"""A model of ours, exported to the official Qwen3 layout and written as GGUF, in llama.cpp's own runtime."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from pairs import assert_close, model, token_ids
from safetensors.torch import load_file

from blockformer.conversion import convert

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


@pytest.fixture
def gguf_model(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gguf_model")


def test_every_weight_of_the_official_layout_has_a_name_of_its_own(gguf_model, tmp_path):
    ours = model(**SIZES)
    ours.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "official", to_official=True)
    weights = load_file(tmp_path / "official/model.safetensors")
    names = {gguf_model.gguf_name(name) for name in weights}
    assert len(names) == len(weights) == 3 + 3 * 11
    assert {"token_embd.weight", "output.weight", "blk.2.attn_k_norm.weight", "blk.0.ffn_down.weight"} <= names
    with pytest.raises(KeyError):
        gguf_model.gguf_name("model.layers.0.self_attn.q_proj.bias")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_writes_what_we_write_in_float32(gguf_model, tmp_path, tied):
    for package in ("gguf", "llama_cpp"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    ours = model(**SIZES, tie_word_embeddings=tied, rope_parameters=rope)
    torch.manual_seed(1)
    with torch.no_grad():  # norms as a trained model has them, each its own
        for weight in ours.parameters():
            if weight.dim() == 1:
                weight.copy_(0.5 + torch.rand(len(weight)))
    ours.generation_config.eos_token_id = None
    ours.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "official", to_official=True)
    entries = json.loads((tmp_path / "official/config.json").read_text())
    weights = load_file(tmp_path / "official/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    gguf_model.write(tmp_path / "model.gguf", entries, weights)

    theirs = gguf_model.GgufModel(tmp_path / "model.gguf", room=64, threads=1, exact=True)
    texts = set()
    for seed, length in enumerate((1, 5, 17)):
        ids = token_ids(1, length, seed)
        wanted = ours.generate(ids, max_new_tokens=24, do_sample=False)[0, length:].tolist()
        with torch.no_grad():
            logits = ours(ids).logits[0, -1]
        theirs.forget()
        assert_close(torch.from_numpy(theirs.feed(ids[0].tolist()).copy()), logits)
        found = theirs.generate(ids[0].tolist(), 24)
        assert found == wanted
        texts.add(tuple(found))
    assert len(texts) == 3
    theirs.close()
