"""sentence-transformers packs texts without padding for flash attention: run on a CPU through our attention.

Only the two questions whether flash attention is there are answered for it. What it gives to the model, and what its
modules make of the result, are its own; the attention is ours over `cu_seq_lens_q`.
"""

import importlib

import numpy as np
import pytest
import torch
from transformers import modeling_flash_attention_utils

from blockformer.conversion import convert

from .search_models import decoder
from .test_sentence_repos import official, opened, save

sentence_transformers = pytest.importorskip("sentence_transformers")
base = importlib.import_module("sentence_transformers.base.modules")
modules = importlib.import_module("sentence_transformers.sentence_transformer.modules")
sparse = importlib.import_module("sentence_transformers.sparse_encoder.modules")
TEXTS = ["the cat sees a dog", "a bird", "the dog and the bird and the cat : not in the text or on a query", "in"]
QUESTIONS = ["why is the sky blue", "cheap trains from Lyon to Turin", "sky", "What does a court of appeal do?"]
GEMMA = {
    "head_dim": 8, "query_pre_attn_scalar": 8, "use_bidirectional_attention": True, "sliding_window": 4,
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
CASES = {
    "positions from a table": ("Bert", "mean"),
    "positions after that of padding": ("XLMRoberta", "cls"),
    "a shared relative bias": ("MPNet", "mean"),
    "windows": ("ModernBert", "cls"),
    "disentangled positions": ("DebertaV2", "mean"),
    "a decoder's last token": ("Qwen3", "lasttoken"),
    "a decoder that looks both ways in windows": ("Gemma3Text", "mean"),
}


def packs(model, monkeypatch, texts):
    """Have the library pack what the model reads."""
    monkeypatch.setattr(base.Transformer, "_is_flash_attention_requested", lambda self: True)
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda name: ((0, 0), 0))
    model[0].unpad_inputs = True
    given = model.preprocess(texts)
    assert len(given["input_ids"]) == 1
    assert len(given["cu_seq_lens_q"]) == len(texts) + 1
    assert "attention_mask" not in given


@pytest.mark.parametrize(("kind", "pooling"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("prepared", [False, True])
def test_vectors_are_those_of_padded_texts(tmp_path, monkeypatch, kind, pooling, prepared):
    texts = TEXTS
    if kind in ("Qwen3", "Gemma3Text"):
        decoder(tmp_path / "plain", kind, "Model", template=None, **(GEMMA if kind == "Gemma3Text" else {}))
        texts = QUESTIONS
    else:
        save(tmp_path / "plain", official(kind))
    parts = [modules.Transformer(str(tmp_path / "plain"), max_seq_length=32), modules.Pooling(32, pooling)]
    theirs = sentence_transformers.SentenceTransformer(modules=parts, device="cpu", prompts={"query": "a dog "})
    theirs.save(str(tmp_path / "src"))
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ours = opened(tmp_path / "dst")
    if prepared:
        ours[0].auto_model.prepare_for_inference()
    padded = ours.encode(texts)
    packs(ours, monkeypatch, texts)
    for prompt in (None, "query"):
        found, expected = (each.encode(texts, prompt_name=prompt) for each in (ours, theirs))
        np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())
    np.testing.assert_allclose(ours.encode(texts), padded, atol=1e-5 * abs(padded).max())
    alone = np.concatenate([theirs.encode([text]) for text in texts])
    np.testing.assert_allclose(ours.encode(texts), alone, atol=1e-5 * abs(alone).max())


def test_sparse_vectors_are_those_of_padded_texts(tmp_path, monkeypatch):
    save(tmp_path / "plain", official("Bert", "ForMaskedLM"))
    parts = [modules.Transformer(str(tmp_path / "plain"), transformer_task="fill-mask"), sparse.SpladePooling("max")]
    theirs = sentence_transformers.SparseEncoder(modules=parts, device="cpu")
    theirs.save_pretrained(str(tmp_path / "src"))
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ours = opened(tmp_path / "dst", sentence_transformers.SparseEncoder)
    packs(ours, monkeypatch, TEXTS)
    found, expected = (each.encode(TEXTS).to_dense() for each in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.max().item(), rtol=0)
