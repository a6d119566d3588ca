"""A decoder as an encoder of texts: the official states, pooled; in sentence-transformers, with LoRA, and back."""

import json

import numpy as np
import page_blocks
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import blockformer
from blockformer.cli import main
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.for_search import convert_for_search
from blockformer.conversion.reshaped import convert_reshaped

from .oracles import stored
from .search_models import decoder

sentence_transformers = pytest.importorskip("sentence_transformers")
TEXTS = ["why is the sky blue", "Turin lies on the river Po.", "cheap trains", "The jury was sent home."]


def embedder(tmp_path, **given):
    return convert_for_search(tmp_path / "src", tmp_path / "dst", use="embedder", **given)


def opened(folder):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)


def pooled(model, folder, pooling, texts=TEXTS):
    """The official states of each text, one text at a time, as one vector of length 1."""
    tokenizer, vectors = AutoTokenizer.from_pretrained(folder), []
    with torch.no_grad():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).last_hidden_state[0]
            vectors.append(states[-1] if pooling == "lasttoken" else states.mean(0))
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1).numpy()


@pytest.mark.parametrize(
    ("kind", "pooling", "both_ways"),
    [("Qwen3", "lasttoken", False), ("Qwen3", "mean", True), ("Gemma2", "mean", False), ("StableLm", "mean", True)],
)
def test_vectors_there_and_everything_back(tmp_path, kind, pooling, both_ways):
    model = decoder(tmp_path / "src", kind, tie_word_embeddings=True).base_model
    report = embedder(tmp_path, pooling=pooling, bidirectional=both_ways, prompts={"query": "judge "})
    assert "vectors at 30 texts" in str(report.parity)
    assert any("causal attention on both sides" in note for note in report.notes) == (kind == "StableLm")
    ours = opened(tmp_path / "dst")
    assert type(ours[0].auto_model).__name__ == "BlockformerDecoderModel"
    assert ours[0].auto_model.config.bidirectional == both_ways
    assert ours.prompts["query"] == "judge "
    if kind != "StableLm":
        model.config.is_causal = not both_ways
        expected = pooled(model, tmp_path / "src", pooling)
        np.testing.assert_allclose(ours.encode(TEXTS), expected, atol=1e-5)
        prompted = pooled(model, tmp_path / "src", pooling, [f"judge {text}" for text in TEXTS])
        np.testing.assert_allclose(ours.encode(TEXTS, prompt_name="query"), prompted, atol=1e-5)
        assert abs(expected[0] - expected[1]).max() > 0.01
        convert(tmp_path / "dst", tmp_path / "official", to_official=True)
        np.testing.assert_allclose(opened(tmp_path / "official").encode(TEXTS), expected, atol=1e-5)
    assert blockformer.verify(tmp_path / "dst").problems == {}

    convert_reshaped(tmp_path / "dst", tmp_path / "ours", topology="decoder")
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    names = {path.name for path in (tmp_path / "src").iterdir()}
    assert names == {path.name for path in (tmp_path / "back").iterdir()} - {".blockformer.json"}
    for name in names - {"model.safetensors"}:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "src" / name).read_bytes(), name


def test_adapters_train_it_and_the_merged_model_is_a_repo(tmp_path):
    peft = pytest.importorskip("peft")
    decoder(tmp_path / "src")
    embedder(tmp_path, bidirectional=True)
    ours = opened(tmp_path / "dst")
    before = ours.encode(TEXTS)
    ours[0].model = peft.get_peft_model(ours[0].model, peft.LoraConfig(r=4, init_lora_weights=False))
    trained = [name for name, each in ours.named_parameters() if each.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    features = ours.preprocess(TEXTS)
    ours(features)["sentence_embedding"].sum().backward()
    assert all(each.grad is not None for each in ours.parameters() if each.requires_grad)
    adapted = ours.encode(TEXTS)
    assert abs(adapted - before).max() > 0.01
    ours[0].model = ours[0].model.merge_and_unload()
    ours.save_pretrained(str(tmp_path / "saved"))
    blockformer.conversion.export_folder(tmp_path / "saved", tmp_path / "merged")
    assert blockformer.verify(tmp_path / "merged").problems == {}
    np.testing.assert_allclose(opened(tmp_path / "merged").encode(TEXTS), adapted, atol=1e-5)
    convert(tmp_path / "merged", tmp_path / "official", to_official=True)
    assert AutoModel.from_pretrained(tmp_path / "official").config.is_causal is False
    np.testing.assert_allclose(opened(tmp_path / "official").encode(TEXTS), adapted, atol=1e-5)


def test_the_block_of_the_page_merges_adapters(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    decoder("src")
    convert_for_search("src", "embedder", use="embedder")
    names = page_blocks.run("retrieval.md", "import LoraConfig")
    assert capsys.readouterr().out.endswith("verified\n")
    np.testing.assert_allclose(opened("merged").encode(TEXTS), names["encoder"].encode(TEXTS), atol=1e-5)


def test_the_command_line_writes_modules_pooling_and_prompts(tmp_path, capsys):
    decoder(tmp_path / "src", "Gemma2", "Model")
    options = ["--as", "embedder", "--bidirectional", "--prompt", "query=Find:\\n", "--prompt", "document=Text: "]
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "src"), str(tmp_path / "dst"), *options])
    told = capsys.readouterr()
    assert not ended.value.code, told.err
    assert "a self-contained repo of an embedder" in told.out
    settings = json.loads((tmp_path / "dst/config_sentence_transformers.json").read_text())
    assert settings["prompts"] == {"query": "Find:\n", "document": "Text: "}
    assert json.loads((tmp_path / "dst/1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"] is True
    types = [each["type"].rpartition(".")[2] for each in json.loads((tmp_path / "dst/modules.json").read_text())]
    assert types == ["Transformer", "Pooling", "Normalize"]
    assert "the model needs training" in (tmp_path / "dst/README.md").read_text()


def test_a_model_that_says_how_it_embeds_keeps_that(tmp_path):
    decoder(tmp_path / "plain", task="Model")
    parts = pytest.importorskip("sentence_transformers.models")
    body = parts.Transformer(str(tmp_path / "plain"))
    sentence_transformers.SentenceTransformer(modules=[body, parts.Pooling(32, "mean")]).save(str(tmp_path / "src"))
    with pytest.raises(ConversionError, match=r"modules.json already says how this model embeds texts; leave out --as"):
        embedder(tmp_path)


def test_an_encoder_is_one_already(tmp_path):
    from transformers import BertConfig, BertModel

    decoder(tmp_path / "src")
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes, intermediate_size=48)).save_pretrained(tmp_path / "src")
    with pytest.raises(ConversionError, match="an embedder is made from a decoder, not from BlockformerEncoderModel"):
        embedder(tmp_path)
    assert not (tmp_path / "dst").exists()


def test_the_last_token_with_instructions_in_the_layout_of_qwen3_embedding(tmp_path):
    """Tensors of the bare stack under the name of the class with a head, as that checkpoint has them."""
    decoder(tmp_path / "plain", task="Model", template=None)
    parts = pytest.importorskip("sentence_transformers.models")
    modules = [parts.Transformer(str(tmp_path / "plain")), parts.Pooling(32, "lasttoken"), parts.Normalize()]
    prompts = {"query": "judge query ", "document": ""}
    theirs = sentence_transformers.SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    theirs.save_pretrained(str(tmp_path / "src"))
    path = tmp_path / "src/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3ForCausalLM"]}))
    assert convert(tmp_path / "src", tmp_path / "dst").parity.passed
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    for folder in ("dst", "back"):
        for encode in ("encode_query", "encode_document"):
            found, expected = (getattr(each, encode)(TEXTS) for each in (opened(tmp_path / folder), theirs))
            np.testing.assert_allclose(found, expected, atol=1e-5)
