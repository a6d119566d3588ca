"""EmbeddingGemma: Gemma 3 that looks both ways with its window, pooled and projected twice."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from transformers import Gemma3TextModel

import blockformer
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.for_search import convert_for_search

from .oracles import entries_of, randomize_biases_and_norms, stored
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


SECOND = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "layer_types": LAYERS["layer_types"],
    "hidden_size_per_layer_input": 6,
    "embedding_dim": 40,
    "sliding_window": 3,
    "initializer_range": 0.3,
}
TOWER = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}


def second(folder, is_whole=False, **settings):
    """A small EmbeddingGemma 2, its norms and stored factors random, saved; or the same next to a vision tower."""
    if not hasattr(transformers, "EmbeddingGemma2TextModel"):
        pytest.skip("this transformers has no embedding_gemma2")
    config = transformers.EmbeddingGemma2TextConfig(**{**SECOND, **settings})
    if is_whole:
        config = transformers.EmbeddingGemma2Config(text_config=config, vision_config=TOWER, audio_config=None)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    randomize_biases_and_norms(model, spread=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def states(model, length=23, **given):
    """The states of real tokens of two rows, of which the second is padded on the right."""
    ids = torch.randint(4, 90, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, length - 8 :] = 0
    return model(input_ids=ids, attention_mask=mask, **given).last_hidden_state[mask.bool()]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sliding_window": 2, "attention_bias": True, "global_head_dim": 8, "num_global_key_value_heads": 2},
        {"embedding_dim": 32, "layer_types": ["full_attention"] * 3},  # as wide as the states, and projected too
    ],
    ids=["usual", "like heads", "square"],
)
def test_the_second_release_goes_in_and_out(tmp_path, settings):
    src, dst, back, fresh = (tmp_path / name for name in ("src", "dst", "back", "fresh"))
    model = second(src, **settings)
    ours = from_official(src)
    expected, found = states(model), states(ours)
    assert expected.shape[-1] == settings.get("embedding_dim", 40)
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    if "layer_types" not in settings:  # there is a window, which counts
        wider = states(second(tmp_path / "wider", **{**settings, "sliding_window": 4}))
        assert (wider - expected).abs().max() > 0.01
    assert convert(src, dst).parity.passed
    assert convert(dst, back, to_official=True).parity.passed
    assert stored(back) == stored(src)
    assert entries_of(back, "config.json") == entries_of(src, "config.json")
    (dst / "conversion.json").unlink()
    report = convert(dst, fresh, to_official=True)
    assert report.family == "embedding_gemma2_text"
    assert report.parity.passed
    assert stored(fresh) == stored(src)
    assert torch.equal(states(type(model).from_pretrained(fresh)), expected)


def test_the_second_release_is_taken_out_of_its_towers_and_put_back(tmp_path):
    src, dst, into = (tmp_path / name for name in ("src", "dst", "into"))
    model = second(src, is_whole=True)
    report = convert(src, dst)
    assert report.parity.passed
    assert any("text model of an embedding_gemma2 checkpoint" in note for note in report.notes)
    expected = states(model)
    found = states(from_official(dst))
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    assert convert(dst, into, to_official=True, into=src).parity.passed
    assert (into / "model.safetensors").read_bytes() == (src / "model.safetensors").read_bytes()
    assert (into / "config.json").read_bytes() == (src / "config.json").read_bytes()
    convert(dst, tmp_path / "text", to_official=True)
    text = transformers.EmbeddingGemma2TextModel.from_pretrained(tmp_path / "text")
    assert torch.equal(states(text), states(model))


@pytest.mark.parametrize("is_whole", [False, True], ids=["text", "whole"])
def test_vectors_of_the_second_release_are_the_same(tmp_path, is_whole):
    """A repo that holds the towers too gives the same vectors of texts, by the modules next to it."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    parts = pytest.importorskip("sentence_transformers.models")
    src, plain = tmp_path / "src", tmp_path / "plain"
    decoder(plain, "Gemma3Text", "Model", template=None, **SIZES, **LAYERS, sliding_window=4)  # for its tokenizer
    model = second(tmp_path / "second", is_whole)
    (model.language_model if is_whole else model).save_pretrained(plain)
    modules = [parts.Transformer(str(plain), max_seq_length=64), parts.Pooling(40, "mean"), parts.Normalize()]
    prompts = {"query": "judge query ", "document": "judge document "}
    theirs = sentence_transformers.SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    theirs.save_pretrained(str(src))
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "second" / name, src / name)
    assert convert(src, tmp_path / "dst").parity.passed
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    for folder, tolerance in (("dst", 1e-5), ("back", 0)):
        ours = sentence_transformers.SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        assert [type(each).__name__ for each in ours] == ["Transformer", "Pooling", "Normalize"]
        for encode in ("encode", "encode_query", "encode_document"):
            found, expected = (getattr(each, encode)(TEXTS) for each in (ours, theirs))
            np.testing.assert_allclose(found, expected, atol=tolerance)
    assert found.shape == (4, 40)


def test_the_second_release_trains_and_runs_prepared(tmp_path):
    second(tmp_path / "src")
    ours = from_official(tmp_path / "src")
    expected = states(ours)
    torch.testing.assert_close(states(ours.prepare_for_inference()), expected, atol=1e-4, rtol=0)
    ours.prepare_for_training()
    ours.train()(input_ids=torch.arange(4, 20)[None]).last_hidden_state.square().mean().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_a_config_that_the_second_release_has_no_word_for(tmp_path):
    second(tmp_path / "src")
    config = from_official(tmp_path / "src").config
    for changes, message in (
        ({"token_input_table": True}, "token_input_table must be False, not True"),
        ({"bidirectional": False}, "bidirectional must be True, not False"),
        ({"final_projection_size": None}, "final_projection_size must be set"),
        ({"attention_by_type": {"full_attention": {"keys_as_values": True}}}, "without keys_as_values"),
        ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "in the last layer"),
    ):
        changed = type(config)(**{**config.to_dict(), **changes})
        blockformer.BlockformerDecoderModel(changed).save_pretrained(tmp_path / message)
        with pytest.raises(ConversionError, match=message):
            convert(tmp_path / message, tmp_path / "out", to_official=True, family="embedding_gemma2_text")
