"""Embedders and rerankers with the files of their repos on the Hub, small: in, in sentence-transformers, and out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from real_repos import RECORDS, checks
from real_repos.common import sentence_files
from real_repos.record import Record, make
from safetensors.torch import load_file, save_file

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.for_search import convert_for_search
from blockformer.conversion.reshaped import convert_reshaped

from .oracles import stored

sentence_transformers = pytest.importorskip("sentence_transformers")
KNOWN = {record.name: record for record in RECORDS}
TEXTS = ["A small boat sails along the river.", "return width * height  # in 2026", "How old is the boat?", "It is."]
CODE = b"raise SystemExit('code of the source was run')\n"


def prompted(pooling: str, normalize: bool = True, **prompts: str) -> dict[str, Any]:
    library = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    return {**sentence_files(pooling, normalize, 64), "config_sentence_transformers.json": library}


def like(name: str, new: str, **changes: Any) -> Record:
    """A record of another repo with the same model and tokenizer; `config` of the changes is added to its own."""
    record = KNOWN[name]
    return replace(record, name=new, **{**changes, "config": {**record.config, **changes.get("config", {})}})


MODERNBERT = "answerdotai/ModernBERT-base"
BARE = {"model": "ModernBertModel", "config": {"architectures": ["ModernBertModel"]}, "spelling": (), "oracle": None}
EMBEDDERS = [
    KNOWN["Qwen/Qwen3-Embedding-0.6B"],
    KNOWN["assumed/jina-embeddings-v3-hf"],
    KNOWN["assumed/nomic-embed-text-v1.5"],
    like(MODERNBERT, "Alibaba-NLP/gte-modernbert-base", **BARE, files=prompted("cls", False), todays={}),
    like(
        MODERNBERT,
        "nomic-ai/modernbert-embed-base",
        **BARE,
        files=prompted("mean", query="search_query: ", document="search_document: "),
        todays={},
    ),
]


def opened(folder, cls=sentence_transformers.SentenceTransformer):
    return cls(str(folder), device="cpu", trust_remote_code=True, model_kwargs={"dtype": torch.float32})


@pytest.mark.parametrize("record", EMBEDDERS, ids=lambda record: record.name)
def test_an_embedder_with_its_own_files(tmp_path, record):
    if record.pieces:
        pytest.importorskip("sentencepiece", reason="sentencepiece makes this tokenizer; install it")
    if not hasattr(transformers, record.oracle_class):
        pytest.skip(f"this transformers has no {record.oracle_class}")
    case = checks.there_and_back(record, tmp_path)
    assert not [note for note in case.notes if "left out" in note]
    theirs = opened(case.source)
    for folder in (case.ours, case.back):
        ours = opened(folder)
        assert (type(ours[0].auto_model).__name__[:11] == "Blockformer") == (folder == case.ours)
        assert ours.prompts == theirs.prompts
        for encode in ("encode_query", "encode_document"):
            found, expected = (getattr(each, encode)(TEXTS) for each in (ours, theirs))
            np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())
    assert abs(expected[0] - expected[1]).max() > 1e-3
    checks.CHECKS["files"]["files back"](case)


RERANKERS = [
    (KNOWN["Qwen/Qwen3-0.6B"], "Qwen/Qwen3-Reranker-0.6B", 2, "<Instruct>: {i}\n<Query>: {q}\n<Document>: {d}"),
    (KNOWN["google/gemma-2b-it"], "BAAI/bge-reranker-v2-gemma", 1, "A: {q}\nB: {d}\n{i}"),
    (KNOWN["Qwen/Qwen2.5-0.5B-Instruct"], "mixedbread-ai/mxbai-rerank-base-v2", 2, "query: {q}\ndocument: {d}\n{i}"),
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}{{ BEFORE + m.content }}{% endif %}"
    "{% if m.role == 'document' %}{{ BETWEEN + m.content + AFTER }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("base", "name", "count", "prompt"), RERANKERS, ids=[each[1] for each in RERANKERS])
def test_a_reranker_with_its_own_files(tmp_path, base, name, count, prompt):
    """The vocabulary is a small one, so two of its pieces stand for the two answers."""
    if base.pieces:
        pytest.importorskip("sentencepiece", reason="sentencepiece makes this tokenizer; install it")
    make(like(base.name, name), tmp_path / "src")
    before, _, rest = prompt.replace("{i}", "Is it so?").partition("{q}")
    between, _, after = rest.partition("{d}")
    pieces = {"BEFORE": before, "BETWEEN": between, "AFTER": after}
    template = TEMPLATE
    for word, text in pieces.items():
        template = template.replace(word, json.dumps(text))
    (tmp_path / "pairs.jinja").write_text(template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "src")
    tokens = tokenizer.convert_ids_to_tokens([300, 301])[-count:]
    report = convert_for_search(
        tmp_path / "src", tmp_path / "dst", use="reranker", tokens=tokens, template=tmp_path / "pairs.jinja"
    )
    assert report.parity.passed
    query, document = TEXTS[2], TEXTS[0]
    ids = tokenizer(f"{before}{query}{between}{document}{after}", add_special_tokens=False, return_tensors="pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "src", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=ids["input_ids"]).logits[0, -1, tokenizer.convert_tokens_to_ids(tokens)]
    expected = torch.sigmoid(logits[-1] - (logits[0] if count == 2 else 0)).item()
    convert(tmp_path / "dst", tmp_path / "official", to_official=True)
    for folder in ("dst", "official"):
        scores = opened(tmp_path / folder, sentence_transformers.CrossEncoder).predict([(query, document)])
        assert abs(scores[0] - expected) < 1e-5
    convert_reshaped(tmp_path / "dst", tmp_path / "ours", topology="decoder")
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    names = {path.name for path in (tmp_path / "src").iterdir() if not path.name.startswith(("model", ".git"))}
    assert {name for name in names if not (tmp_path / "back" / name).is_file()} <= {"gemma-2b-it.gguf"}


VOYAGE = {
    "architectures": ["Qwen3BidirectionalModel"],
    "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
    "num_labels": 48,
    "use_bidirectional_attention": True,
}
PROMPTS = {
    "query": "Represent the query for retrieving supporting documents: ",
    "document": "Represent the document for retrieval: ",
}


@pytest.fixture
def voyage(tmp_path):
    """voyage-4-nano: code of its own around Qwen3, whose tokens see later ones, and a projection of every state."""
    record = like(
        "Qwen/Qwen3-Embedding-0.6B", "voyageai/voyage-4-nano", files={**prompted("mean", **PROMPTS)}, todays={}
    )
    make(record, tmp_path / "src")
    folder = tmp_path / "src"
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **VOYAGE}))
    weights = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(3)
    weights["linear.weight"] = torch.randn(48, 32).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "modeling_qwen3_bidirectional.py").write_bytes(CODE)
    return folder


def test_voyage_4_nano_is_refused_by_its_class_and_its_settings(tmp_path, voyage):
    for door in (convert, lambda source, target: convert_for_search(source, target, use="embedder")):
        with pytest.raises(ConversionError, match=r"architectures is .*Qwen3BidirectionalModel.*cannot be converted"):
            door(voyage, tmp_path / "dst")
    path = voyage / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3Model"]}))
    for door in (convert, lambda source, target: convert_for_search(source, target, use="embedder")):
        with pytest.raises(ConversionError, match=r"use_bidirectional_attention is 'True': .*is_causal: false"):
            door(voyage, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def rewritten(folder, name="voyage-4-nano", **changes):
    """Run what docs/retrieval.md says to do with it, with some words changed."""
    page = (Path(__file__).parents[2] / "docs/retrieval.md").read_text(encoding="utf-8")
    program = page.partition(f"### {name}")[2].split("```")[1]
    for old, new in {f'Path("{name}")': f"Path({str(folder)!r})", **changes}.items():
        assert old in program
        program = program.replace(old, new)
    exec(program, {})


def test_voyage_4_nano_with_its_projection_as_a_module(tmp_path, voyage):
    weights = {name: tensor.float() for name, tensor in load_file(voyage / "model.safetensors").items()}
    settings = json.loads((voyage / "config.json").read_text())
    model = transformers.Qwen3Model(transformers.Qwen3Config(**{**settings, "dtype": "float32"})).eval()
    names = model.load_state_dict({name.removeprefix("model."): each for name, each in weights.items()}, strict=False)
    assert names.unexpected_keys == ["linear.weight"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(voyage)

    def vector(text):
        ids = tokenizer(PROMPTS["query"] + text, return_tensors="pt")["input_ids"]
        everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        with torch.no_grad():
            states = model(input_ids=ids, attention_mask={"full_attention": everything}).last_hidden_state
        return torch.nn.functional.normalize((states @ weights["linear.weight"].T).mean(1), dim=-1)[0]

    expected = torch.stack([vector(text) for text in TEXTS]).numpy()
    rewritten(voyage)
    assert convert(voyage, tmp_path / "dst").parity.passed
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(voyage)
    for folder in ("dst", "back"):
        np.testing.assert_allclose(opened(tmp_path / folder).encode_query(TEXTS), expected, atol=1e-5)
    assert blockformer.verify(tmp_path / "dst").is_ok


@pytest.mark.parametrize("kind", ["bge-reranker-v2-minicpm-layerwise", "MiniCPM-Reranker", "MiniCPM-Embedding"])
def test_models_of_minicpm_s_own_code_are_refused_by_their_type(tmp_path, kind):
    make(like("openbmb/MiniCPM3-4B", kind), tmp_path / "src")
    path = tmp_path / "src/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "minicpm"}))
    for use, tokens in (("reranker", ["Yes"]), ("embedder", None)):
        with pytest.raises(ConversionError, match="model_type 'minicpm' is not supported"):
            convert_for_search(tmp_path / "src", tmp_path / "dst", use=use, tokens=tokens)


MINICPM = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FACTORS = {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 8, "head_type": "simple", "head_multi": True}


def test_a_layerwise_reranker_of_minicpm_as_granite(tmp_path, tiny_tokenizer):
    """Oracle: its formula with Llama's parts; a row for each number of layers from 2 on, and 3 of 4 layers taken."""
    torch.manual_seed(0)
    llama = transformers.LlamaModel(transformers.LlamaConfig(**MINICPM, initializer_range=0.3)).eval()
    for norm in (each for each in llama.modules() if type(each).__name__ == "LlamaRMSNorm"):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    rows = torch.randn(3, 1, 32)
    weights = {f"model.{name}": tensor for name, tensor in llama.state_dict().items()}
    weights |= {f"lm_head.{number}.linear_head.weight": row.clone() for number, row in enumerate(rows)}
    folder = tmp_path / "src"
    tiny_tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text("{}")
    settings = {**MINICPM, **FACTORS, "start_layer": 2, "rms_norm_eps": 1e-6, "model_type": "minicpm"}
    (folder / "config.json").write_text(json.dumps({**settings, "bos_token_id": 0, "eos_token_id": 1}))
    (tmp_path / "pairs.jinja").write_text(
        TEMPLATE.replace("BEFORE", "'A: '").replace("BETWEEN", "'B: '").replace("AFTER", "'?'")
    )

    token = tiny_tokenizer.convert_ids_to_tokens(300)
    rewritten(folder, "bge-reranker-v2-minicpm-layerwise", **{"28  #": "3  #", '"Yes"': repr(token)})
    options = {"use": "reranker", "tokens": [token], "template": tmp_path / "pairs.jinja"}
    assert convert_for_search(folder, tmp_path / "dst", **options).parity.passed

    ids = tiny_tokenizer(f"A: {TEXTS[2]}B: {TEXTS[0]}?", add_special_tokens=False, return_tensors="pt")["input_ids"]
    factor = 1.4 / 4**0.5
    with torch.no_grad():
        states = llama.embed_tokens(ids) * 3
        places = llama.rotary_emb(states, torch.arange(ids.shape[1])[None])
        hidden = torch.full((1, 1, ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
        for layer in llama.layers[:3]:
            states = states + factor * layer.self_attn(layer.input_layernorm(states), places, hidden)[0]
            states = states + factor * layer.mlp(layer.post_attention_layernorm(states))
        expected = torch.sigmoid(llama.norm(states)[0, -1] @ rows[1, 0]).item()
    scores = opened(tmp_path / "dst", sentence_transformers.CrossEncoder).predict([(TEXTS[2], TEXTS[0])])
    assert 0.01 < expected < 0.99
    assert abs(scores[0] - expected) < 1e-5


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["JinaBertForMaskedLM"]}, "JinaBertForMaskedLM"),
        (
            {"architectures": ["BertModel"], "position_embedding_type": "alibi"},
            "position_embedding_type must .* not 'alibi'",
        ),
    ],
    ids=["class", "positions"],
)
def test_jina_embeddings_v2_is_refused_by_its_class_and_its_positions(tmp_path, settings, named):
    make(like("sentence-transformers/all-MiniLM-L6-v2", "jinaai/jina-embeddings-v2-base-en"), tmp_path / "src")
    path = tmp_path / "src/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings, "feed_forward_type": "geglu"}))
    with pytest.raises(ConversionError, match=named):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
