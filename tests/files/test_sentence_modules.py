"""Every module class of sentence-transformers in a small folder: converted, verified, opened, given back."""

import importlib
import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from pairs import assert_close
from safetensors.torch import load_file, save_file

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder
from blockformer.conversion.reshaped import convert_reshaped
from blockformer.summary import summarize

from ..conversion.oracles import entries_of
from ..conversion.test_convert_faults import a_hub_with
from ..conversion.test_sentence_repos import TEXTS, WORDS, official, opened, save

sentence_transformers = pytest.importorskip("sentence_transformers")
PACKAGES = ("sentence_transformer", "sparse_encoder", "multi_vector_encoder", "cross_encoder")
MODULES = {
    name: getattr(package, name)
    for package in (importlib.import_module(f"sentence_transformers.{each}.modules") for each in PACKAGES)
    for name in package.__all__
}
NOT_TRIED = {
    "Module": "abstract",
    "InputModule": "abstract",
    "BaseTokenPooling": "abstract",
    "LambdaTokenPooling": "cannot be saved",
    "CLIPModel": "reads images",
    **dict.fromkeys(("BoW", "WordEmbeddings", "StaticEmbedding"), "takes the place of the model"),
}
INNER = "0_Transformer"
"""Where releases before 2.0 wrote the model."""
SETTINGS_OF_BERT = "sentence_bert_config.json"
OF_TOKENS = {"module_input_name": "token_embeddings"}


def make(name, *arguments, **settings):
    return MODULES[name](*arguments, **settings)


def dense(width=8, **settings):
    torch.manual_seed(1)
    return make("Dense", 32, width, **settings)


def mean():
    return make("Pooling", 32, "mean")


# Module -> the modules after the transformer, made when they are needed. Where another class opens them: its name too.
SENTENCES = {
    "Transformer": lambda: [mean()],
    "Dense": lambda: [mean(), dense(activation_function=torch.nn.Identity()), make("Normalize")],
    "Dropout": lambda: [mean(), make("Dropout", 0.3)],
    "Normalize": lambda: [mean(), make("Normalize")],
    "LayerNorm": lambda: [mean(), make("LayerNorm", 32)],
    "LSTM": lambda: [make("LSTM", 32, 8), make("Pooling", 16, "max")],
    "CNN": lambda: [make("CNN", 32, 8, [1, 3]), make("Pooling", 16, "mean")],
    "WordWeights": lambda: [make("WordWeights", WORDS, {"cat": 3.0, "dog": 0.5}), mean()],
    "Router": lambda: [
        mean(),
        make("Router", {"query": [dense()], "document": [dense(), make("LayerNorm", 8)]}, "query"),
    ],
    "Asym": lambda: [
        mean(),
        make("Asym", {"query": [dense()], "document": [make("Dense", 32, 8)]}, allow_empty_key=True),
    ],
    "Pooling": lambda: [make("Pooling", 32, MODULES["Pooling"].POOLING_MODES)],
}
SPARSE = {
    "SpladePooling": lambda: [make("SpladePooling", "max")],
    "SpladePooling sum": lambda: [make("SpladePooling", "sum")],
    "MLMTransformer": lambda: [make("SpladePooling", "max")],
    "SparseAutoEncoder": lambda: [mean(), make("SparseAutoEncoder", 32, 64, k=8, k_aux=8)],
    "SparseStaticEmbedding": lambda: [make("SpladePooling", "max")],
}
MULTI = {
    "MultiVectorMask": lambda: [dense(**OF_TOKENS), make("MultiVectorMask", skiplist_words=[":"])],
    "HierarchicalTokenPooling": lambda: [
        dense(**OF_TOKENS),
        make("MultiVectorMask"),
        make("HierarchicalTokenPooling", 2),
    ],
}
CROSS = {"LogitScore": lambda: [make("LogitScore", 5, 6)]}
LAYERS = {"WeightedLayerPooling": lambda: [make("WeightedLayerPooling", 32, 2, 1), mean()]}
CASES = [*SENTENCES, *SPARSE, *MULTI, *CROSS, *LAYERS]


def test_each_module_is_tried_or_says_why_not():
    tried = {name.split()[0] for name in CASES}
    assert tried | NOT_TRIED.keys() == MODULES.keys()
    assert not tried & NOT_TRIED.keys()


def build(folder, case):
    """The folder of a case, and the class that opens it."""
    plain = folder.with_name("plain")
    transformer = {}
    if case in SPARSE and case != "SparseAutoEncoder":
        save(plain, official("Bert", "ForMaskedLM"))
        cls, transformer = sentence_transformers.SparseEncoder, {"transformer_task": "fill-mask"}
    elif case in CROSS:
        save(plain, official("Qwen3", "ForCausalLM", num_key_value_heads=2, head_dim=8))
        cls, transformer = sentence_transformers.CrossEncoder, {"transformer_task": "text-generation"}
    else:
        save(plain, official("Bert"))
        cls = sentence_transformers.MultiVectorEncoder if case in MULTI else sentence_transformers.SentenceTransformer
        cls = sentence_transformers.SparseEncoder if case in SPARSE else cls
    transformer |= {"config_kwargs": {"output_hidden_states": True}} if case in LAYERS else {}
    kind = "MLMTransformer" if case == "MLMTransformer" else "Transformer"
    transformer = {} if kind == "MLMTransformer" else transformer
    body = make(kind, str(plain), max_seq_length=32, **transformer)
    after = (SENTENCES | SPARSE | MULTI | CROSS | LAYERS)[case]()
    modules = [body, *after]
    if case == "SparseStaticEmbedding":  # queries are looked up in a table, and only documents are read by the model
        table = make(case, body.tokenizer, torch.rand(len(WORDS), generator=torch.Generator().manual_seed(2)))
        modules = [make("Router", {"query": [table], "document": modules}, "document")]
    model = cls(modules=modules, device="cpu", **({} if case in CROSS else {"prompts": {"query": "query : "}}))
    model.save_pretrained(str(folder))
    if case in LAYERS:
        settings = entries_of(folder, "sentence_bert_config.json")
        settings["config_args"] = {"output_hidden_states": True}
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return cls


def outputs(folder, cls):
    """What a model says of some texts, as plain arrays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = opened(folder, cls)
        if cls is sentence_transformers.CrossEncoder:
            return [torch.tensor(model.predict([(TEXTS[0], text) for text in TEXTS]))]
        found = []
        for text in TEXTS:
            for encode in (model.encode_query, model.encode_document):
                value = encode([text])[0]
                value = value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value
                found.append(torch.as_tensor(np.asarray(value)) if not isinstance(value, torch.Tensor) else value)
        return found


def files(folder):
    """Name -> content of every file, of pickled weights their tensors."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: content(folder / name) for name in names if name != ".blockformer.json"}


def content(path):
    if path.name == "pytorch_model.bin":
        return {name: tensor.tolist() for name, tensor in torch.load(path, weights_only=True).items()}
    if path.parent.name in ("src", "dst-back", "exported-back", INNER) and path.name == "model.safetensors":
        return {name: tensor.tolist() for name, tensor in load_file(path).items()}  # of the model, compared elsewhere
    return path.read_bytes()


def there_and_back(source, **options):
    """Convert a folder, export the result, verify both and take both back, which gives every file again."""
    folder = source.parent
    report = convert(source, folder / "dst", verify=False, **options)
    export_folder(folder / "dst", folder / "exported")
    for name in ("dst", "exported"):
        found = blockformer.verify(folder / name)
        assert found.is_ok, found.problems
        convert(folder / name, folder / f"{name}-back", to_official=True, verify=False)
        assert files(folder / f"{name}-back") == files(source)
    return report


def assert_opened_alike(folder, cls):
    expected = outputs(folder / "src", cls)
    for name, compare in (("dst", assert_close), ("dst-back", lambda one, other: torch.equal(one, other) or 1 / 0)):
        for ours, theirs in zip(outputs(folder / name, cls), expected, strict=True):
            compare(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_a_module_there_and_back(tmp_path, case):
    cls = build(tmp_path / "src", case)
    assert not there_and_back(tmp_path / "src").notes
    if case != "LSTM":  # which reads lengths that only word embeddings give
        assert_opened_alike(tmp_path, cls)


@pytest.fixture
def source(tmp_path):
    """A sentence encoder with a projection."""
    save(tmp_path / "plain", official("Bert"))
    parts = [make("Transformer", str(tmp_path / "plain"), max_seq_length=32), mean(), dense()]
    sentence_transformers.SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(tmp_path / "src"))
    return tmp_path / "src"


def edit_modules(folder, number, **changes):
    modules = entries_of(folder, "modules.json")
    modules[number] |= changes
    (folder / "modules.json").write_text(json.dumps(modules))


def pickle_weights(folder, change=0.0):
    """The weights of a module as a pickle too."""
    tensors = {name: tensor + change for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.save(tensors, folder / "pytorch_model.bin")


LAYOUTS = {
    "a folder of another name, and one for another size": ["2_Dense_1024", "2_Dense_256"],
    "a folder in a folder": ["modules/Projection"],
    "a folder with a name in words": ["My projection"],
}


@pytest.mark.parametrize("folders", LAYOUTS.values(), ids=LAYOUTS)
def test_folders_of_any_name(tmp_path, source, folders):
    for folder in folders:
        shutil.copytree(source / "2_Dense", source / folder)
    shutil.rmtree(source / "2_Dense")
    edit_modules(source, 2, path=folders[0])
    assert not there_and_back(source).notes
    assert_opened_alike(tmp_path, sentence_transformers.SentenceTransformer)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_older_names_of_the_settings(tmp_path, source, kind):
    (source / "sentence_bert_config.json").rename(source / f"sentence_{kind}_config.json")
    (source / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 5, "do_lower_case": false}')
    there_and_back(source)
    assert opened(tmp_path / "dst").max_seq_length == 5


def test_the_older_settings_of_pooling_and_routes(tmp_path, source):
    old = {"word_embedding_dimension": 32, **dict.fromkeys(POOLING, False), "pooling_mode_max_tokens": True}
    (source / "1_Pooling/config.json").write_text(json.dumps(old))
    (source / "3_Asym/140_Dense").mkdir(parents=True)
    settings = entries_of(source, "2_Dense/config.json") | {"in_features": 8}
    (source / "3_Asym/140_Dense/config.json").write_text(json.dumps(settings))
    torch.save({"linear.weight": torch.randn(8, 8), "linear.bias": torch.randn(8)}, tmp_path / "x.bin")
    (tmp_path / "x.bin").rename(source / "3_Asym/140_Dense/pytorch_model.bin")
    routes = {"types": {"140_Dense": "sentence_transformers.models.Dense"}, "structure": {"query": ["140_Dense"]}}
    routes |= {"parameters": {"allow_empty_key": True}}
    (source / "3_Asym/config.json").write_text(json.dumps(routes))
    modules = entries_of(source, "modules.json")
    modules.append({"idx": 3, "name": "3", "path": "3_Asym", "type": "sentence_transformers.models.Asym"})
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (source / "modules.json").write_text(json.dumps(modules))
    assert not there_and_back(source).notes
    assert opened(tmp_path / "dst")[3].sub_modules["query"]
    names = {path.name for path in (tmp_path / "dst").rglob("*") if path.is_file()}
    assert "pytorch_model.bin" not in names
    expected, found = (opened(tmp_path / name).encode_query(TEXTS) for name in ("src", "dst"))
    assert_close(torch.tensor(found), torch.tensor(expected))


POOLING = [f"pooling_mode_{kind}_token{'s' * (kind != 'cls')}" for kind in ("cls", "max", "mean", "mean_sqrt_len")]


@pytest.mark.parametrize("change", [None, 0.0, 0.25], ids=["only", "the same", "others"])
def test_weights_of_a_module_as_a_pickle(tmp_path, source, change):
    """Nothing that is called carried is missing, no pickle is in the repo, and the pickle comes back."""
    pickle_weights(source / "2_Dense", change or 0.0)
    if change is None:
        (source / "2_Dense/model.safetensors").unlink()
    there_and_back(source)
    record = entries_of(tmp_path / "dst", "conversion.json")["files"]
    assert all((tmp_path / "dst" / name).exists() for name in [*record["carried"], *record["written"]])
    assert not list((tmp_path / "dst").rglob("*.bin"))
    assert_opened_alike(tmp_path, sentence_transformers.SentenceTransformer)


def test_a_projection_that_was_trained_further_goes_back_as_it_is(tmp_path, source):
    pickle_weights(source / "2_Dense")
    (source / "2_Dense/model.safetensors").unlink()
    convert(source, tmp_path / "dst", verify=False)
    model = opened(tmp_path / "dst")
    torch.nn.init.ones_(model[2].linear.weight)
    save_file(dict(model[2].state_dict()), tmp_path / "dst/2_Dense/model.safetensors")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    for name in ("model.safetensors", "pytorch_model.bin"):
        load = load_file if name.startswith("model") else torch.load
        assert load(tmp_path / "back/2_Dense" / name)["linear.weight"].eq(1).all()


@pytest.mark.parametrize(
    "kind", ["pylate.models.Dense.Dense", "pylate.models.dense.Dense", "pylate.models.LinearOther"]
)
def test_modules_of_pylate(tmp_path, source, kind):
    edit_modules(source, 2, type=kind)
    (source / "config_sentence_transformers.json").write_text('{"model_type": "ColBERT", "query_prefix": "[Q] "}')
    assert not there_and_back(source).notes


def test_a_router_in_front_whose_one_route_is_the_model(tmp_path, source):
    """The model lies next to `modules.json`, as transformers wants it, and the Router's other modules in folders."""
    (source / "1_Pooling").rename(source / "document_1_Pooling")
    (source / "2_Dense").rename(source / "document_2_Dense")
    kinds = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    kinds = dict(zip(("", "document_1_Pooling"), kinds, strict=True)) | {"document_2_Dense": "base.modules.dense.Dense"}
    router = {
        "types": {name: f"sentence_transformers.{kind}" for name, kind in kinds.items()},
        "structure": {"document": [*kinds]},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    (source / "router_config.json").write_text(json.dumps(router))
    kind = "sentence_transformers.base.modules.router.Router"
    (source / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    assert not there_and_back(source).notes
    expected, found = (opened(tmp_path / name).encode(TEXTS) for name in ("src", "dst"))
    assert_close(torch.tensor(found), torch.tensor(expected))


def into_a_folder(source, router=False):
    """Put the model of a folder into one of its own, as releases before 2.0 did."""
    (source / INNER).mkdir()
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", SETTINGS_OF_BERT)
    for name in names:
        (source / name).rename(source / INNER / name)
    if not router:
        edit_modules(source, 0, path=INNER)


@pytest.fixture
def older(source):
    """The encoder as early releases wrote it, with a `config.json` of their own, a card and a pickled projection."""
    into_a_folder(source)
    pickle_weights(source / "2_Dense")
    (source / "2_Dense/model.safetensors").unlink()
    (source / "config.json").write_text('{"__version__": "0.2.5"}')
    (source / "README.md").write_text("---\nlicense: mit\n---\nA card.\n")
    (source / INNER / "LICENSE").write_text("The model's.")
    (source / INNER / "vocab.txt").write_text("\n".join(WORDS))
    return source


def test_a_model_in_a_folder_of_its_own(tmp_path, older):
    assert not there_and_back(older).notes
    assert not (tmp_path / "dst" / INNER).exists()
    assert "license: mit" in (tmp_path / "dst/README.md").read_text()
    assert_opened_alike(tmp_path, sentence_transformers.SentenceTransformer)
    assert convert(older, tmp_path / "again", verify="quick").parity.passed
    assert convert(tmp_path / "again", tmp_path / "official", to_official=True, verify="quick").parity.passed
    with torch.no_grad():
        ids = torch.arange(4, 12)[None]
        models = blockformer.from_official(older), blockformer.BlockformerEncoderModel.from_pretrained(tmp_path / "dst")
        expected = official("Bert")(ids)[0]
        for model in models:
            assert_close(model(ids)[0], expected)
    assert summarize(older).config.vocab_size == len(WORDS)
    convert_reshaped(older, tmp_path / "shallow", layers=[0])
    assert opened(tmp_path / "shallow").encode(TEXTS).shape == (len(TEXTS), 8)


def test_what_is_added_to_a_repo_whose_model_had_a_folder_goes_back_to_its_place(tmp_path, older):
    convert(older, tmp_path / "dst", verify=False)
    model = opened(tmp_path / "dst")
    torch.nn.init.ones_(model[2].linear.weight)
    save_file(dict(model[2].state_dict()), tmp_path / "dst/2_Dense/model.safetensors")
    modules = entries_of(tmp_path / "dst", "modules.json")
    kind = "sentence_transformers.sentence_transformer.modules.normalize.Normalize"
    modules.append({"idx": 3, "name": "3", "path": "3_Normalize", "type": kind})
    (tmp_path / "dst/modules.json").write_text(json.dumps(modules))
    (tmp_path / "dst/3_Normalize").mkdir()
    (tmp_path / "dst/3_Normalize/config.json").write_text("{}")
    (tmp_path / "dst/config_sentence_transformers.json").write_text('{"prompts": {"query": "q : "}}')
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    back = opened(tmp_path / "back")
    assert [module["path"] for module in entries_of(tmp_path / "back", "modules.json")][::3] == [INNER, "3_Normalize"]
    assert back[2].linear.weight.eq(1).all()
    assert back.prompts["query"] == "q : "
    assert sorted(path.name for path in (tmp_path / "back").iterdir() if path.is_dir()) == [
        INNER,
        "1_Pooling",
        "2_Dense",
        "3_Normalize",
    ]


def test_a_repo_of_ours_that_lies_in_a_folder(tmp_path, source):
    """As older releases of sentence-transformers save one."""
    ours = tmp_path / "ours"
    convert(source, ours, verify=False)
    (ours / INNER).mkdir()
    for path in list(ours.iterdir()):
        if path.name not in (INNER, "1_Pooling", "2_Dense", "modules.json", "config_sentence_transformers.json"):
            path.rename(ours / INNER / path.name)
    edit_modules(ours, 0, path=INNER)
    export_folder(ours, tmp_path / "dst")
    assert blockformer.verify(tmp_path / "dst").is_ok
    convert(ours, tmp_path / "dst-back", to_official=True, verify="quick")
    assert_opened_alike(tmp_path, sentence_transformers.SentenceTransformer)
    with torch.no_grad():
        ids = torch.arange(4, 12)[None]
        assert_close(blockformer.from_official(ours)(ids)[0], official("Bert")(ids)[0])


def test_a_router_whose_model_is_in_a_folder(tmp_path, source):
    into_a_folder(source, router=True)
    kinds = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    kinds = dict(zip((INNER, "1_Pooling"), kinds, strict=True)) | {"2_Dense": "base.modules.dense.Dense"}
    router = {
        "types": {name: f"sentence_transformers.{kind}" for name, kind in kinds.items()},
        "structure": {"query": [INNER, "1_Pooling", "2_Dense"], "document": [INNER, "1_Pooling", "2_Dense"]},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    (source / "router_config.json").write_text(json.dumps(router))
    kind = "sentence_transformers.base.modules.router.Router"
    (source / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    assert not there_and_back(source).notes
    assert_opened_alike(tmp_path, sentence_transformers.SentenceTransformer)
    opened(tmp_path / "dst").save_pretrained(str(tmp_path / "again"))
    (inner,) = (path.parent for path in (tmp_path / "again").glob("*/modeling_encoder.py"))
    with pytest.raises(ConversionError, match=f"the model is in the subfolder .*{inner.name}': name .*{inner.name}"):
        blockformer.verify(tmp_path / "again")
    assert blockformer.verify(inner).is_ok


def test_of_a_hub_repo_the_folder_of_the_model_is_fetched(tmp_path, older, monkeypatch):
    a_hub_with(monkeypatch, older)
    report = convert("somebody/model", tmp_path / "dst", verify=False)
    assert not report.notes
    assert not report.left_out
    convert(tmp_path / "dst", tmp_path / "dst-back", to_official=True, verify=False)
    assert files(tmp_path / "dst-back") == files(older)


def test_options_that_choose_the_weights_of_a_model_in_a_folder(tmp_path, older):
    for door in (convert, lambda source, target, **options: blockformer.from_official(source, **options)):
        with pytest.raises(
            ConversionError, match=r"/0_Transformer: no weights; .*leave out variant and use_safetensors"
        ):
            door(older, tmp_path / "dst", use_safetensors=False)
    (older / INNER / "model.safetensors").rename(older / INNER / "model.fp16.safetensors")
    with pytest.raises(ConversionError, match=r"/0_Transformer: no weights; .*--variant fp16\) others are read"):
        convert(older, tmp_path / "dst")
    (older.parent / "repo").mkdir()
    older.rename(older.parent / "repo/encoder")
    convert(older.parent / "repo", tmp_path / "dst", variant="fp16", subfolder="encoder", verify=False)
    model = blockformer.from_official(older.parent / "repo", variant="fp16", subfolder="encoder")
    with torch.no_grad():
        assert_close(model(torch.arange(4, 12)[None])[0], official("Bert")(torch.arange(4, 12)[None])[0])
    assert opened(tmp_path / "dst").encode(TEXTS).shape == (len(TEXTS), 8)


def test_what_must_not_be_followed_around_a_model_in_a_folder(tmp_path, older):
    edit_modules(older, 2, type="modeling_own.Projection")
    report = convert(older, tmp_path / "dst", verify=False)
    assert "sentence-transformers' files are left out" in report.notes[0]
    assert not (tmp_path / "dst/modules.json").exists()
    assert blockformer.verify(tmp_path / "dst").is_ok
    convert(tmp_path / "dst", tmp_path / "dst-back", to_official=True, verify=False)
    assert files(tmp_path / "dst-back") == files(older)


def test_two_models_and_none_are_refused(tmp_path, older):
    shutil.copytree(older / INNER, older / "1_Transformer")
    edit_modules(older, 1, path="1_Transformer")
    doors = (lambda: convert(older, tmp_path / "dst"), lambda: blockformer.from_official(older))
    for door in doors:
        with pytest.raises(ConversionError, match=r"but 2 in '0_Transformer', '1_Transformer': a repo holds one"):
            door()
    shutil.rmtree(older / INNER)
    (older / "1_Transformer").rename(older / "elsewhere")
    (older / INNER).symlink_to("elsewhere")
    for door in doors:
        with pytest.raises(ConversionError, match="'0_Transformer', which is a link: put the folder itself there"):
            door()
    (older / INNER).unlink()
    (older / "config.json").unlink()
    for door in doors:
        with pytest.raises(ConversionError, match=r"modules\.json, and no config\.json: only models of transformers"):
            door()


@pytest.mark.parametrize("inner", ["../out", "/out", "conversion", 3])
def test_a_record_that_names_a_place_outside_is_refused(tmp_path, older, inner):
    convert(older, tmp_path / "dst", verify=False)
    record = entries_of(tmp_path / "dst", "conversion.json")
    record["files"]["inner"] = inner
    (tmp_path / "dst/conversion.json").write_text(json.dumps(record))
    with pytest.raises(ConversionError, match="damaged"):
        convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)


FOREIGN = {
    "code of the repo": {"type": "modeling_own.Projection"},
    "a function of the library": {"type": "sentence_transformers.util.import_from_string"},
    "a library with a name that begins alike": {"type": "sentence_transformers_own.models.Dense"},
    "a folder outside": {"path": "../2_Dense"},
    "a folder outside, as Windows has it": {"path": "..\\2_Dense"},
    "what the way back reads": {"path": "conversion/source"},
}


@pytest.mark.parametrize("fault", FOREIGN)
def test_what_must_not_be_followed_is_left_out_and_comes_back(tmp_path, source, fault):
    pickle_weights(source / "2_Dense")
    convert(source, tmp_path / "good", verify=False)
    edit_modules(source, 2, **FOREIGN[fault])
    report = convert(source, tmp_path / "dst", verify=False)
    assert "sentence-transformers' files are left out" in report.notes[0]
    assert not (tmp_path / "dst/modules.json").exists()
    assert blockformer.verify(tmp_path / "dst").is_ok
    back = convert(tmp_path / "dst", tmp_path / "dst-back", to_official=True, verify=False)
    assert any("copy it from there" in note for note in back.notes) == ("type" in FOREIGN[fault])
    assert files(tmp_path / "dst-back") == files(source)
    edit_modules(tmp_path / "good", 2, **FOREIGN[fault])
    assert len(blockformer.verify(tmp_path / "good").problems["settings"]) == 1


@pytest.mark.parametrize(
    ("name", "entry", "named"),
    [
        ("2_Dense/config.json", {"activation_function": "os.system"}, "activation_function"),
        ("config_sentence_transformers.json", {"activation_fn": "mine.Activation"}, "activation_fn"),
        ("sentence_bert_config.json", {"config_args": {"attn_implementation": "a/kernel"}}, "attn_implementation"),
    ],
)
def test_verify_finds_code_that_settings_name_as_convert_does(tmp_path, source, name, entry, named):
    convert(source, tmp_path / "dst", verify=False)
    for folder in (source, tmp_path / "dst"):
        (folder / name).write_text(json.dumps(entries_of(folder, name) | entry))
    (problem,) = blockformer.verify(tmp_path / "dst").problems["settings"]
    assert problem.startswith(f"{name}: {named} names ")
    note = convert(source, tmp_path / "again", verify=False).notes[0]
    assert f"modules.json: {named} '{next(iter(entry.values()))}' in" in note or named == "attn_implementation"
    assert "files are left out" in note


def test_of_a_hub_repo_the_folders_of_modules_are_fetched_without_code(tmp_path, source, monkeypatch):
    (source / "2_Dense").rename(source / "2_Dense_1024")
    edit_modules(source, 2, path="2_Dense_1024")
    (source / "2_Dense_1024/own.py").write_text("raise SystemExit\n")
    (source / "onnx").mkdir()
    (source / "onnx/model.onnx").write_bytes(b"stub")
    asked = a_hub_with(monkeypatch, source)
    report = convert("somebody/model", tmp_path / "dst", verify=False)
    assert set(files(source)) - set(asked) == {"2_Dense_1024/own.py", "onnx/model.onnx"}
    assert sorted(name for names in report.left_out.values() for name in names) == [
        "2_Dense_1024/own.py",
        "onnx/model.onnx",
    ]
    assert (tmp_path / "dst/2_Dense_1024/model.safetensors").is_file()
    assert blockformer.verify(tmp_path / "dst").is_ok
