"""Repos of sentence-transformers: pooling, normalising and prompts survive both ways, and vectors are the same."""

import json
import os

import numpy as np
import pytest
import torch
import transformers
from sizes import OFFICIAL_ENCODER
from tokenizers import Tokenizer, models, pre_tokenizers

from blockformer.conversion import ConversionError, convert, from_official

from .oracles import edit_config, edit_tensors, entries_of, stored

sentence_transformers = pytest.importorskip("sentence_transformers")
parts_of = pytest.importorskip("sentence_transformers.models")
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *"the a cat dog bird sees hears and or not in on : query text".split()]
TEXTS = ["the cat sees a dog", "a bird", "the dog and the bird and the cat : not in the text or on a query"]
SIZES = {**OFFICIAL_ENCODER, "vocab_size": len(WORDS)}
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}


def save(folder, model, **special):
    """The model with a tokenizer of whole words; `special` are more special tokens."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **SPECIAL, **special)
    tokenizer.save_pretrained(folder)


def opened(folder, cls=sentence_transformers.SentenceTransformer, **settings):
    return cls(str(folder), device="cpu", trust_remote_code=True, **settings)


def official(kind, task="Model", **more):
    """A small official model of a kind, with random weights."""
    torch.manual_seed(0)
    own = {
        "ModernBert": {"cls_token_id": 0, "sep_token_id": 2, "local_attention": 8},
        "DebertaV2": {
            "relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 8,
            "position_biased_input": False, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1,
        },
    }  # fmt: skip
    settings = {**SIZES, **own.get(kind, {}), **more}
    return getattr(transformers, kind + task)(getattr(transformers, f"{kind}Config")(**settings)).eval()


@pytest.mark.parametrize(
    ("kind", "pooling", "projects"),
    [
        ("MPNet", "mean", False),
        ("ModernBert", "cls", True),
        pytest.param("ModernBert", "mean", True, marks=pytest.mark.exhaustive),
        pytest.param("MPNet", "lasttoken", True, marks=pytest.mark.exhaustive),
        pytest.param("DebertaV2", "cls", True, marks=pytest.mark.exhaustive),
    ],
)
def test_embeddings_with_prompts_there_and_back(tmp_path, kind, pooling, projects):
    save(tmp_path / "plain", official(kind))
    body = parts_of.Transformer(str(tmp_path / "plain"), max_seq_length=32)
    dense = [parts_of.Dense(32, 16, activation_function=torch.nn.Tanh())] if projects else []
    parts = [body, parts_of.Pooling(32, pooling), *dense, parts_of.Normalize()]
    theirs = sentence_transformers.SentenceTransformer(
        modules=parts, device="cpu", prompts={"query": "query : ", "text": "text : "}, default_prompt_name="text"
    )
    theirs.save(str(tmp_path / "src"))
    assert not convert(tmp_path / "src", tmp_path / "dst", verify=False).notes
    ours = opened(tmp_path / "dst")
    assert type(ours[0].auto_model).__name__ == "BlockformerEncoderModel"
    assert (ours.prompts, ours.default_prompt_name) == (theirs.prompts, "text")
    for prompt in (None, "query"):
        found, expected = (each.encode(TEXTS, prompt_name=prompt) for each in (ours, theirs))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(expected - theirs.encode(TEXTS)).max() > 0.01
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    for name in ("modules.json", *(["2_Dense/config.json"] if projects else [])):
        assert entries_of(tmp_path / "back", name) == entries_of(tmp_path / "src", name)
    assert np.array_equal(opened(tmp_path / "back").encode(TEXTS), theirs.encode(TEXTS))


@pytest.mark.parametrize("stores", ["safetensors", "pickle"])
def test_late_interaction_there_and_back(tmp_path, stores):
    """A vector for each token, through a projection without a bias, as ColBERT has it."""
    multi = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
    save(tmp_path / "plain", official("ModernBert"))
    body = parts_of.Transformer(str(tmp_path / "plain"), max_seq_length=32)
    of_tokens = {"module_input_name": "token_embeddings"}
    parts = [body, parts_of.Dense(32, 8, bias=False, activation_function=torch.nn.Identity(), **of_tokens)]
    parts += [parts_of.Normalize(**of_tokens), multi.MultiVectorMask(skiplist_words=[":"])]
    cls = sentence_transformers.MultiVectorEncoder
    theirs = cls(modules=parts, device="cpu", prompts={"query": "query : ", "document": "text : "})
    theirs.save_pretrained(str(tmp_path / "src"), safe_serialization=stores == "safetensors")
    if stores == "pickle":
        state = {name: tensor.detach().clone() for name, tensor in theirs[1].state_dict().items()}
        torch.save(state, tmp_path / "src/1_Dense/pytorch_model.bin")
        (tmp_path / "src/1_Dense/model.safetensors").unlink(missing_ok=True)
    assert not convert(tmp_path / "src", tmp_path / "dst", verify=False).notes
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    for folder, tolerance in (("dst", 1e-5), ("back", 0)):
        found = opened(tmp_path / folder, cls)
        assert type(found[0].auto_model).__name__.startswith("Blockformer") == (folder == "dst")
        for encode in ("encode_query", "encode_document"):
            pairs = list(zip(getattr(found, encode)(TEXTS), getattr(theirs, encode)(TEXTS), strict=True))
            assert len(pairs) == len(TEXTS)
            for ours, expected in pairs:
                np.testing.assert_allclose(ours, expected, atol=tolerance)
                assert ours.shape[1] == 8
    assert os.listdir(tmp_path / "dst/1_Dense").count("model.safetensors") == 1


def test_a_projection_that_names_other_code_is_left_out(tmp_path):
    save(tmp_path / "plain", official("MPNet"))
    parts = [parts_of.Transformer(str(tmp_path / "plain")), parts_of.Pooling(32), parts_of.Dense(32, 8)]
    sentence_transformers.SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "src"))
    path = tmp_path / "src/2_Dense/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"activation_function": "os.system"}))
    note = convert(tmp_path / "src", tmp_path / "dst", verify=False).notes[0]
    assert "activation_function 'os.system' in 2_Dense; sentence-transformers' files are left out" in note
    assert not (tmp_path / "dst/modules.json").exists()
    assert not (tmp_path / "dst/2_Dense").exists()
    assert convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    for name in ("modules.json", "2_Dense/config.json", "2_Dense/model.safetensors"):  # they lie inert in the repo
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "src" / name).read_bytes()


@pytest.mark.parametrize("kind", ["MPNet", "ModernBert", "DebertaV2"])
def test_a_reranker_gives_the_same_scores(tmp_path, kind):
    save(tmp_path / "src", official(kind, "ForSequenceClassification", num_labels=1))
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "src"), device="cpu")
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ours = opened(tmp_path / "dst", sentence_transformers.CrossEncoder)
    pairs = [(TEXTS[0], text) for text in TEXTS]
    found, expected = (each.predict(pairs) for each in (ours, theirs))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert expected.std() > 1e-3
    theirs.save_pretrained(str(tmp_path / "saved"))
    convert(tmp_path / "saved", tmp_path / "again", verify=False)
    again = opened(tmp_path / "again", sentence_transformers.CrossEncoder)
    np.testing.assert_allclose(again.predict(pairs), expected, atol=1e-5)


def test_colberts_own_class_is_refused_with_what_helps(tmp_path):
    """colbertv2.0 and answerai-colbert-small-v1 hold their projection as `linear.weight`."""
    save(tmp_path / "src", official("Bert"), mask_token="text")  # which queries are filled up with
    projection = {"linear.weight": torch.randn(8, 32)}
    edit_tensors(tmp_path / "src", lambda all_: {f"bert.{name}": each for name, each in all_.items()} | projection)
    edit_config(tmp_path / "src", architectures=["HF_ColBERT"])
    (tmp_path / "src/artifact.metadata").write_text('{"query_maxlen": 8, "doc_maxlen": 16}')
    for door in (lambda: convert(tmp_path / "src", tmp_path / "dst"), lambda: from_official(tmp_path / "src")):
        with pytest.raises(ConversionError, match=r"MultiVectorEncoder\(FOLDER\)\.save_pretrained\(NEW\); convert NEW"):
            door()
    cls = sentence_transformers.MultiVectorEncoder
    theirs = opened(tmp_path / "src", cls)
    theirs.save_pretrained(str(tmp_path / "new"))
    convert(tmp_path / "new", tmp_path / "dst", verify=False)
    ours = opened(tmp_path / "dst", cls)
    assert type(ours[0].auto_model).__name__ == "BlockformerEncoderModel"
    for encode in ("encode_query", "encode_document"):
        for found, expected in zip(getattr(ours, encode)(TEXTS), getattr(theirs, encode)(TEXTS), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
            assert found.shape[1] == 8


def test_modules_around_a_whole_t5_are_left_out_with_what_helps(tmp_path):
    """sentence-transformers loads T5EncoderModel for its config, and would run the decoder of ours, too."""
    sizes = {"vocab_size": len(WORDS), "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    whole = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=1)).eval()
    save(tmp_path / "whole", whole)
    body = parts_of.Transformer(str(tmp_path / "whole"), max_seq_length=32)
    theirs = sentence_transformers.SentenceTransformer(modules=[body, parts_of.Pooling(32)], device="cpu")
    theirs.save_pretrained(str(tmp_path / "new"))
    save(tmp_path / "src", whole)
    for name in ("modules.json", "1_Pooling/config.json"):
        (tmp_path / "src" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "src" / name).write_bytes((tmp_path / "new" / name).read_bytes())
    notes = " ".join(convert(tmp_path / "src", tmp_path / "left", verify=False).notes)
    assert "only the encoder of a t5" in notes
    assert not (tmp_path / "left/modules.json").exists()
    convert(tmp_path / "left", tmp_path / "back", to_official=True, verify=False)
    assert np.array_equal(opened(tmp_path / "back").encode(TEXTS), opened(tmp_path / "src").encode(TEXTS))
    convert(tmp_path / "new", tmp_path / "dst", verify=False)
    found, expected = opened(tmp_path / "dst"), opened(tmp_path / "src")
    assert type(found[0].auto_model).__name__ == "BlockformerEncoderModel"
    np.testing.assert_allclose(found.encode(TEXTS), expected.encode(TEXTS), atol=1e-5)
