"""EmbeddingGemma: Gemma 3 that looks both ways with its window, pooled and projected twice."""

import json

import numpy as np
import pytest
import torch
import transformers
from transformers import Gemma3TextModel

import blockformer
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.for_search import convert_for_search

from .oracles import entries_of, stored
from .search_models import decoder

TEXTS = ["why is the sky blue " * 6, "Turin lies on the river Po.", "cheap trains", "The jury was sent home. " * 4]
SIZES = {"head_dim": 8, "query_pre_attn_scalar": 8, "use_bidirectional_attention": True}
LAYERS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}


@pytest.mark.parametrize("window", [4, 5, 512])
def test_states_are_those_of_the_official_model(tmp_path, window):
    model = decoder(tmp_path / "src", "Gemma3Text", "Model", **SIZES, **LAYERS, sliding_window=window)
    assert entries_of(tmp_path / "src", "config.json")["sliding_window"] == window // 2 * 2
    ours = from_official(tmp_path / "src")
    assert (ours.config.bidirectional, ours.config.sliding_window) == (True, window // 2)
    ids = torch.randint(4, 90, (2, 23), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
        found = ours(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
        causal = decoder(
            tmp_path / "causal",
            "Gemma3Text",
            "Model",
            **{**SIZES, **LAYERS, "sliding_window": window} | {"use_bidirectional_attention": False},
        )(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    assert (causal - expected).abs().max() > 0.01
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.parity.passed
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert entries_of(tmp_path / "back", "config.json") == entries_of(tmp_path / "src", "config.json")


def test_a_config_of_ours_is_written_with_the_official_window(tmp_path, tiny_tokenizer):
    config = blockformer.preset(
        "gemma3_text", vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, bidirectional=True, sliding_window=3, layer_types=LAYERS["layer_types"],
    )  # fmt: skip
    blockformer.BlockformerDecoderModel(config).save_pretrained(tmp_path / "ours")
    report = convert(tmp_path / "ours", tmp_path / "official", to_official=True)
    assert report.parity.passed
    entries = json.loads((tmp_path / "official/config.json").read_text())
    assert (entries["use_bidirectional_attention"], entries["sliding_window"]) == (True, 6)
    assert Gemma3TextModel.from_pretrained(tmp_path / "official").config.sliding_window == 4  # exclusive
    assert from_official(tmp_path / "official").config.sliding_window == 3


def test_a_causal_one_becomes_an_embedder_that_looks_both_ways(tmp_path):
    decoder(tmp_path / "src", "Gemma3", **{**SIZES, "use_bidirectional_attention": False}, **LAYERS, sliding_window=4)
    assert convert_for_search(tmp_path / "src", tmp_path / "dst", use="embedder", bidirectional=True).parity.passed
    assert convert(tmp_path / "dst", tmp_path / "official", to_official=True).parity.passed
    assert entries_of(tmp_path / "official", "config.json")["sliding_window"] == 8  # four to each side


def test_two_ways_to_say_it_at_once_are_refused(tmp_path):
    decoder(tmp_path / "src", "Gemma3Text", "Model", **SIZES, **LAYERS, sliding_window=4, is_causal=False)
    with pytest.raises(ConversionError, match="which mean different windows; remove is_causal"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_projections_prompts_and_vectors(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    parts = pytest.importorskip("sentence_transformers.models")
    decoder(tmp_path / "plain", "Gemma3Text", "Model", template=None, **SIZES, **LAYERS, sliding_window=4)
    torch.manual_seed(1)
    bare = {"bias": False, "activation_function": torch.nn.Identity()}
    modules = [parts.Transformer(str(tmp_path / "plain"), max_seq_length=64), parts.Pooling(32, "mean")]
    modules += [parts.Dense(32, 96, **bare), parts.Dense(96, 32, **bare), parts.Normalize()]
    prompts = {"query": "judge query ", "document": "judge document "}
    theirs = sentence_transformers.SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    theirs.save_pretrained(str(tmp_path / "src"))
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.parity.passed
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    for folder, tolerance in (("dst", 1e-5), ("back", 0)):
        ours = sentence_transformers.SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        assert [type(each).__name__ for each in ours] == ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
        assert ours.prompts == prompts
        for encode in ("encode", "encode_query", "encode_document"):
            found, expected = (getattr(each, encode)(TEXTS) for each in (ours, theirs))
            np.testing.assert_allclose(found, expected, atol=tolerance)
    assert abs(theirs.encode(TEXTS) - expected).max() > 1e-3
    for name in ("2_Dense/model.safetensors", "3_Dense/model.safetensors", "modules.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "src" / name).read_bytes()


PARTS_OF_ITS_OWN = ("ple.per_layer_model_projection", "ple_block.per_layer_input_gate", "layer_scalar")
WIDE = {"global_head_dim": 16, "num_global_key_value_heads": 1}


def test_the_second_release_is_refused_by_the_parts_that_ours_lack(tmp_path):
    """transformers knows it since 5.23. The sentence of the error holds as long as its class has these parts."""
    if not hasattr(transformers, "EmbeddingGemma2TextModel"):
        pytest.skip("this transformers has no embedding_gemma2")
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 8, "embedding_dim": 16}
    text = transformers.EmbeddingGemma2TextConfig(**sizes, **WIDE, layer_types=["sliding_attention", "full_attention"])
    whole = transformers.EmbeddingGemma2Config(text_config=text, vision_config=None, audio_config=None)
    for config, name in ((text, "text"), (whole, "whole")):
        model = transformers.AutoModel.from_config(config)
        names = [*model.state_dict()]
        assert all(any(part in each for each in names) for part in PARTS_OF_ITS_OWN)
        keys = [tensor.shape[0] for each, tensor in model.state_dict().items() if each.endswith("k_proj.weight")]
        assert keys == [2 * 8, 1 * 16]
        model.save_pretrained(tmp_path / name)
        for door in (
            lambda source: convert(source, tmp_path / "dst"),
            from_official,
            lambda source: convert_for_search(source, tmp_path / "dst", use="embedder"),
        ):
            with pytest.raises(ConversionError, match=r"'embedding_gemma2(_text)?' is not supported: .*per-layer emb"):
                door(tmp_path / name)
    assert not (tmp_path / "dst").exists()
