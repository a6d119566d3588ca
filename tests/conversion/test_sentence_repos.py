"""Repos of sentence-transformers: pooling, normalising and prompts survive both ways, and vectors are the same."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from blockformer.conversion import convert

from .oracles import entries_of, stored

sentence_transformers = pytest.importorskip("sentence_transformers")
parts_of = pytest.importorskip("sentence_transformers.models")
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *"the a cat dog bird sees hears and or not in on : query text".split()]
TEXTS = ["the cat sees a dog", "a bird", "the dog and the bird and the cat : not in the text or on a query"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "initializer_range": 0.4,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}


def save(folder, model):
    """The model with a tokenizer of whole words."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **SPECIAL)
    tokenizer.save_pretrained(folder)


def opened(folder, **settings):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", trust_remote_code=True, **settings)


@pytest.mark.parametrize("pooling", ["mean", pytest.param("cls", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["MPNet", pytest.param("ModernBert", marks=pytest.mark.exhaustive)])
def test_embeddings_with_prompts_there_and_back(tmp_path, kind, pooling):
    torch.manual_seed(0)
    more = {} if kind == "MPNet" else {"cls_token_id": 0, "sep_token_id": 2, "local_attention": 8}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**SIZES, **more))
    save(tmp_path / "plain", model)
    body = parts_of.Transformer(str(tmp_path / "plain"), max_seq_length=32)
    parts = [body, parts_of.Pooling(32, pooling), parts_of.Normalize()]
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
    assert entries_of(tmp_path / "back", "modules.json") == entries_of(tmp_path / "src", "modules.json")
    assert np.array_equal(opened(tmp_path / "back").encode(TEXTS), theirs.encode(TEXTS))


def test_a_reranker_gives_the_same_scores(tmp_path):
    torch.manual_seed(0)
    save(tmp_path / "src", transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**SIZES, num_labels=1)))
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "src"), device="cpu")
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ours = sentence_transformers.CrossEncoder(str(tmp_path / "dst"), device="cpu", trust_remote_code=True)
    pairs = [(TEXTS[0], text) for text in TEXTS]
    found, expected = (each.predict(pairs) for each in (ours, theirs))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert expected.std() > 1e-3
    theirs.save_pretrained(str(tmp_path / "saved"))
    convert(tmp_path / "saved", tmp_path / "again", verify=False)
    again = sentence_transformers.CrossEncoder(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.predict(pairs), expected, atol=1e-5)
