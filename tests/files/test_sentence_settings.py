"""Every setting that sentence-transformers reads: carried or translated, with its effect, given back, or refused."""

import importlib
import inspect
import json
import re
import shutil
from typing import Any, NamedTuple

import pytest
import torch
from pairs import assert_close
from transformers import AutoTokenizer

import blockformer
from blockformer.conversion import ConversionError, convert

from ..conversion import search_models
from ..conversion.oracles import entries_of
from ..conversion.test_sentence_repos import TEXTS, official, opened, save
from .test_sentence_modules import MODULES, build, files, make, mean, outputs, there_and_back

sentence_transformers = pytest.importorskip("sentence_transformers")
SETTINGS, BODY = "config_sentence_transformers.json", "sentence_bert_config.json"
OF_A_MODEL = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


class Row(NamedTuple):
    """A setting: entries for a file, in a folder of a case of `test_sentence_modules`.

    Attributes:
        entries: of the file; a name of the table stands among them.
        case: of the folder.
        seen: what shows the effect, of an opened model; None: its vectors or scores.
        has_effect: whether these texts on this machine show one.
    """

    entries: dict[str, Any]
    case: str = "LayerNorm"
    seen: Any = None
    has_effect: bool = True


def of_the_model(model):
    """What settings that change no number leave behind."""
    return torch.tensor([model[0].unpad_inputs is False, model[0].module_output_name == "token_embeddings"]).float()


def default_vectors(model):
    return torch.tensor(model.encode(TEXTS))


def tensors(model):
    return model.encode(TEXTS, convert_to_tensor=True)


def similarities(model):
    return model.similarity(model.encode(TEXTS), model.encode(TEXTS))


NO_EXPANSION = {"do_query_expansion": False}
EXPANSION = {"strategy": "fixed", "attend": True, "length": 9, "token": "cat"}
MODEL = {
    "transformer_task": Row({"transformer_task": "feature-extraction"}, has_effect=False),
    "model_kwargs": Row({"model_kwargs": {"dtype": "float64"}}, "Transformer", tensors),
    "model_args": Row({"model_args": {"attn_implementation": "eager"}}, has_effect=False),
    "processor_kwargs": Row({"processor_kwargs": {"model_max_length": 4}, "max_seq_length": None}),
    "tokenizer_args": Row({"tokenizer_args": {"model_max_length": 4}, "max_seq_length": None}),
    "config_kwargs": Row({"config_kwargs": {"layer_norm_eps": 0.5}}),
    "config_args": Row({"config_args": {"hidden_act": "relu", "layer_norm_eps": 0.5, "of_another_tool": 1}}),
    "processing_kwargs": Row({"processing_kwargs": {"text": {"max_length": 4, "truncation": True}}}),
    "modality_config": Row({"modality_config": OF_A_MODEL, "module_output_name": "token_embeddings"}, has_effect=False),
    "module_output_name": Row(
        {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}}
        | {"module_output_name": "sentence_embedding"},
        "Transformer only",
    ),
    "unpad_inputs": Row({"unpad_inputs": False}, seen=of_the_model),
    "query_length": Row({"query_length": 3}, "MultiVectorMask"),
    "document_length": Row({"document_length": 3}, "MultiVectorMask"),
    "query_expansion": Row({"query_expansion": EXPANSION}, "MultiVectorMask"),
    "max_seq_length": Row({"max_seq_length": 4}),
    "do_lower_case": Row(
        {"do_lower_case": True}, seen=lambda model: torch.tensor(model.encode(["The CAT sees a dog"]))
    ),
}
LIBRARY = {
    "model_type": Row({"model_type": "SentenceTransformer"}, has_effect=False),
    "__version__": Row({"__version__": {"sentence_transformers": "2.2.2"}}, has_effect=False),
    "requirements": Row({"requirements": {"transformers": ">=5"}}, has_effect=False),
    "prompts": Row({"prompts": {"query": "a dog : ", "document": ""}}),
    "default_prompt_name": Row({"default_prompt_name": "query"}, seen=default_vectors),
    "similarity_fn_name": Row({"similarity_fn_name": "euclidean"}, seen=similarities),
    "truncate_dim": Row({"truncate_dim": 5}),
    "max_active_dims": Row({"max_active_dims": 3}, "SpladePooling"),
    "activation_fn": Row({"activation_fn": "torch.nn.modules.linear.Identity"}, "LogitScore"),
    "keep_in_fp32_modules": Row(
        {"keep_in_fp32_modules": ["0.model.lm_head", "0.model.model.layers.0.mlp.up_proj"]},
        "LogitScore",
        lambda model: torch.tensor([type(each).__name__ == "_Float32Linear" for each in model.modules()]).sum().float(),
    ),
    "query_prefix": Row(
        {"model_type": "ColBERT", "query_prefix": "a ", "do_query_expansion": False}, "MultiVectorMask"
    ),
    "document_prefix": Row({"document_prefix": "cat ", "do_query_expansion": False}, "MultiVectorMask"),
    "skiplist_words": Row(
        {"skiplist_words": ["cat"], "do_query_expansion": False}, "MultiVectorMask", has_effect=False
    ),
    "do_query_expansion": Row({"do_query_expansion": False, "skiplist_words": []}, "MultiVectorMask", has_effect=False),
    "query_length": Row({"query_length": 3, "do_query_expansion": False}, "MultiVectorMask"),
    "document_length": Row({"document_length": 3, "do_query_expansion": False}, "MultiVectorMask"),
    "query_expansion": Row({"query_expansion": EXPANSION}, "MultiVectorMask"),
    "attend_to_expansion_tokens": Row({"attend_to_expansion_tokens": True}, "MultiVectorMask", has_effect=False),
    "attend_to_mask_tokens": Row({"attend_to_mask_tokens": True}, "MultiVectorMask", has_effect=False),
}
GIVEN_BY_CALLERS = {"self", "model_name_or_path", "backend"}
OTHER_REPO = "tokenizer_name_or_path"
ROWS = [*((BODY, *each) for each in MODEL.items()), *((SETTINGS, *each) for each in LIBRARY.items())]


def test_each_setting_that_the_library_reads_is_in_the_table():
    parameters = inspect.signature(MODULES["Transformer"].__init__).parameters
    earlier = {"model_args", "tokenizer_args", "config_args"}
    assert MODEL.keys() | {OTHER_REPO} == parameters.keys() - GIVEN_BY_CALLERS | earlier
    read = {"query_prefix", "document_prefix", "query_length", "document_length", "query_expansion"}  # by a variable
    names = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder")
    for each in {base for name in names for base in getattr(sentence_transformers, name).__mro__}:
        if each.__module__.startswith("sentence_transformers."):
            read |= {*re.findall(r'model_config(?:\.get\(|\[)"(\w+)"', inspect.getsource(each))}
            read |= {*re.findall(r'"(\w+)" in model_config\b', inspect.getsource(each))}
    assert LIBRARY.keys() == read - {"sentence_transformers"} | {"model_type"}  # that one stands in __version__


def with_entries(folder, name, entries):
    settings = entries_of(folder, name) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**settings, **entries}))


def folder_for(folder, case):
    if case != "Transformer only":
        cls = build(folder, case)
        with_entries(folder, "tokenizer_config.json", {"eos_token": "</s>"})  # fills queries that are expanded
        return cls
    save(folder.with_name("plain"), official("Bert"))
    body = make("Transformer", str(folder.with_name("plain")), max_seq_length=32)
    sentence_transformers.SentenceTransformer(modules=[body, mean()], device="cpu").save_pretrained(str(folder))
    (folder / "modules.json").write_text(json.dumps(entries_of(folder, "modules.json")[:1]))
    return sentence_transformers.SentenceTransformer


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Case -> its folder, which is made once and copied, and the class that opens it."""
    made = {}

    def of(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("case") / "src"
            made[case] = folder, folder_for(folder, case)
        return made[case]

    return of


@pytest.mark.parametrize(("name", "key", "row"), ROWS, ids=[f"{name.split('_')[0]}-{key}" for name, key, _ in ROWS])
def test_a_setting_there_and_back(tmp_path, folder_of, name, key, row):
    assert key in row.entries
    folder, cls = folder_of(row.case)
    shutil.copytree(folder, tmp_path / "src")

    def seen(folder):
        if row.seen is None:
            return outputs(tmp_path / folder, cls)
        return [row.seen(opened(tmp_path / folder, cls))]

    plain = None if row.case == "Transformer only" else seen("src")
    with_entries(tmp_path / "src", name, row.entries)
    expected = seen("src")
    if row.has_effect and plain is not None:
        pairs = zip(expected, plain, strict=True)
        assert any(one.dtype != other.dtype or not torch.equal(one, other) for one, other in pairs)
    there_and_back(tmp_path / "src")
    for ours, theirs in zip(seen("dst"), expected, strict=True):
        assert_close(ours, theirs)
    assert all(map(torch.equal, seen("dst-back"), expected))


@pytest.mark.parametrize(
    ("kind", "options", "ours"),
    [
        ("Qwen3", {"rms_norm_eps": 0.5}, {"norm_eps": 0.5}),
        ("Qwen3", {"is_causal": False, "bidirectional": True}, {"is_causal": False}),  # which Qwen3's config lacks
        ("Gemma2", {"query_pre_attn_scalar": 2}, {"attention_scale": 2**-0.5}),
        ("Gemma2", {"attn_logit_softcapping": 5.0, "of_a_tool": 1}, {"attn_logit_softcapping": 5.0, "of_a_tool": 1}),
    ],
)
def test_options_for_a_config_are_our_fields(tmp_path, kind, options, ours):
    """transformers drops an option that a config does not have, without a word, on both sides."""
    search_models.decoder(tmp_path / "plain", kind, task="Model", template=None)
    parts = [make("Transformer", str(tmp_path / "plain"), max_seq_length=32), mean()]
    sentence_transformers.SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(tmp_path / "src"))
    texts = list(search_models.QUERIES)
    plain = torch.tensor(opened(tmp_path / "src").encode(texts))
    with_entries(tmp_path / "src", BODY, {"config_args": options})
    expected = torch.tensor(opened(tmp_path / "src").encode(texts))
    assert torch.allclose(expected, plain, atol=1e-4) == ("is_causal" in options)
    there_and_back(tmp_path / "src")
    assert entries_of(tmp_path / "dst", BODY)["config_args"] == ours
    assert_close(torch.tensor(opened(tmp_path / "dst").encode(texts)), expected)


def test_a_module_that_computes_in_float32_by_its_name_in_ours(tmp_path):
    save(tmp_path / "plain", official("Bert", "ForSequenceClassification", num_labels=1).to(torch.bfloat16))
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "plain"), device="cpu")
    theirs.set_keep_in_fp32_modules(["0.model.classifier"])
    theirs.save_pretrained(str(tmp_path / "src"))
    there_and_back(tmp_path / "src")
    ours = opened(tmp_path / "dst", sentence_transformers.CrossEncoder)
    assert type(ours[0].auto_model.get_submodule(ours.keep_in_fp32_modules[0].removeprefix("0.model."))) is type(
        theirs[0].auto_model.classifier
    )
    assert ours.predict([(TEXTS[0], TEXTS[1])]).dtype == theirs.predict([(TEXTS[0], TEXTS[1])]).dtype == "float32"


@pytest.mark.parametrize(
    ("name", "entries", "named"),
    [
        (BODY, {"config_args": {"is_decoder": 3}}, "config_args: "),
        (BODY, {"config_kwargs": {"pooler_act": 3}, "config_args": {"hidden_act": "nothing"}}, "config_args: "),
        (SETTINGS, {"keep_in_fp32_modules": ["0.model.head"]}, "names '0.model.head', which is not a module of this"),
    ],
)
def test_what_ours_cannot_follow_is_refused_by_name(tmp_path, name, entries, named):
    build(tmp_path / "src", "LayerNorm")
    with_entries(tmp_path / "src", name, entries)
    with pytest.raises(ConversionError, match=named):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_an_option_that_others_would_follow_from_is_refused(tmp_path):
    """Read from config.json it halves the window; set afterwards, as transformers sets an option, it does not."""
    window = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    search_models.decoder(tmp_path / "plain", "Gemma3Text", task="Model", template=None, head_dim=8, **window)
    parts = [make("Transformer", str(tmp_path / "plain"), max_seq_length=32), mean()]
    sentence_transformers.SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(tmp_path / "src"))
    with_entries(tmp_path / "src", BODY, {"config_args": {"use_bidirectional_attention": True}})
    with pytest.raises(ConversionError, match="other settings follow from 'use_bidirectional_attention', and not if"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_a_tokenizer_of_another_repo_is_left_out(tmp_path):
    """With trust in this repo's code, the code of that one would be run."""
    build(tmp_path / "src", "LayerNorm")
    convert(tmp_path / "src", tmp_path / "good", verify=False)
    for folder in ("src", "good"):
        with_entries(tmp_path / folder, BODY, {OTHER_REPO: "somebody/else"})
    report = convert(tmp_path / "src", tmp_path / "dst", verify=False)
    assert "tokenizer_name_or_path 'somebody/else' in sentence_bert_config.json is another repo" in report.notes[0]
    assert not (tmp_path / "dst/modules.json").exists()
    assert "another repo, 'somebody/else'" in blockformer.verify(tmp_path / "good").problems["settings"][0]
    convert(tmp_path / "dst", tmp_path / "dst-back", to_official=True, verify=False)
    assert files(tmp_path / "dst-back") == files(tmp_path / "src")


def words():
    kinds = importlib.import_module("sentence_transformers.sentence_transformer.modules.tokenizer")
    return kinds.WhitespaceTokenizer(["cat", "dog"])


def table_of_words(name, tmp_path, *arguments, **settings):
    save(tmp_path / "plain", official("Bert"))
    return make(name, AutoTokenizer.from_pretrained(tmp_path / "plain"), *arguments, **settings)


IN_ITS_PLACE = {
    "BoW": lambda tmp_path: make("BoW", ["cat", "dog"]),
    "WordEmbeddings": lambda tmp_path: make("WordEmbeddings", words(), [[1.0, 2.0], [3.0, 4.0]]),
    "StaticEmbedding": lambda tmp_path: table_of_words("StaticEmbedding", tmp_path, embedding_dim=8),
    "SparseStaticEmbedding": lambda tmp_path: table_of_words("SparseStaticEmbedding", tmp_path),
}


@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_what_takes_the_place_of_the_model_is_refused_by_name(tmp_path, kind):
    cls = (
        sentence_transformers.SparseEncoder if kind.startswith("Sparse") else sentence_transformers.SentenceTransformer
    )
    model = cls(modules=[IN_ITS_PLACE[kind](tmp_path)], device="cpu")
    model.save_pretrained(str(tmp_path / "src"))
    for _ in range(2):
        for door in (convert, lambda source, target: blockformer.from_official(source)):
            with pytest.raises(ConversionError, match=f"first module is a {kind}, and only models of transformers"):
                door(tmp_path / "src", tmp_path / "dst")
        (tmp_path / "src/config.json").write_text('{"model_type": "model2vec", "hidden_dim": 8}')  # as some repos have
    assert not (tmp_path / "dst").exists()
