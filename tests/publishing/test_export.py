"""Exported repos: complete, readable in an afternoon, closed code, and an export that fails leaves nothing."""

import ast
import json
import os
import re
import stat
from pathlib import Path

import peft
import pytest
import torch
from sizes import PUBLISHED, TINY

import blockformer
from blockformer.files.sizes import format_size
from blockformer.publishing import code_files, copy_code, export_model, full_auto_map, save_tokenizer, write_card
from blockformer.summary import state_bytes

FORBIDDEN_MODULES = {"socket", "subprocess", "urllib", "http", "requests", "shutil", "pickle", "ctypes", "tempfile"}
FORBIDDEN_CALLS = {"exec", "eval", "compile", "__import__", "print", "input"}
FORBIDDEN_METHODS = set("write_text write_bytes touch mkdir makedirs unlink rmdir remove rename system popen".split())


@pytest.fixture
def model():
    return blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **PUBLISHED)).eval()


def test_an_exported_repo_is_complete(tmp_path, model, tiny_tokenizer):
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    assert export_model(model, tmp_path / "repo", tokenizer=tiny_tokenizer) == tmp_path / "repo"
    names = {path.name for path in (tmp_path / "repo").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "README.md", "tokenizer.json"}
    assert code_files(model.config).keys() <= names
    entries = json.loads((tmp_path / "repo/config.json").read_text())
    assert entries["auto_map"] == full_auto_map(model.config)
    tokenizer = json.loads((tmp_path / "repo/tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    card = (tmp_path / "repo/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "AutoModelForCausalLM" in card
    assert f"{model.num_parameters():,}" in card
    assert "| `temperature` | 0.7 |" in card
    assert "$" not in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


@pytest.mark.parametrize(("preset", "task"), [("t5", "Seq2SeqLM"), ("gpt2", "CausalLM"), ("roberta", "MaskedLM")])
def test_a_card_names_the_auto_class_of_the_task(tmp_path, preset, task):
    """AutoModelForPreTraining loads the same model."""
    config = blockformer.preset(preset)
    config.architectures = [full_auto_map(config)[f"AutoModelFor{task}"].partition(".")[2]]
    card = write_card(tmp_path, config).read_text()
    assert {*re.findall(r"AutoModel\w+", card)} == {f"AutoModelFor{task}"}


def test_a_model_with_parts_of_its_own_is_refused(tmp_path, model):
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    with pytest.raises(ValueError, match=r"PeftModelForCausalLM only contains .*: merge adapters into it first"):
        export_model(adapted, tmp_path / "repo")
    for publish in (lambda: export_model(model, tmp_path / "repo"), lambda: model.push_to_hub("ann/small")):
        with pytest.raises(ValueError, match=r"base_layer.weight is not a weight of Blockformer.*: merge adapters"):
            publish()
    assert not (tmp_path / "repo").exists()
    merged = adapted.merge_and_unload()
    export_model(torch.compile(merged), tmp_path / "repo")
    again = type(model).from_pretrained(tmp_path / "repo")
    assert torch.equal(again.state_dict()["lm_head.weight"], merged.state_dict()["lm_head.weight"])
    merged.lm_head = torch.nn.Sequential(merged.lm_head)
    with pytest.raises(ValueError, match=r"lm_head.0.weight is not a weight of .*put back replaced parts"):
        export_model(merged, tmp_path / "other")


def test_weights_come_in_shards_with_the_permissions_of_the_umask(tmp_path, model):
    export_model(model, tmp_path / "repo", max_shard_size="20KB")
    assert len(list((tmp_path / "repo").glob("model-*.safetensors"))) > 1
    umask = os.umask(0)
    os.umask(umask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "repo").iterdir()}
    assert modes == {0o666 & ~umask}


def test_an_export_is_whole_or_not_there(tmp_path, model, monkeypatch):
    export_model(model, tmp_path / "repo", card="first")
    with pytest.raises(ValueError, match="already exists"):
        export_model(model, tmp_path / "repo", card="second")
    monkeypatch.setattr("blockformer.publishing.export.write_card", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_model(model, tmp_path / "repo", force=True)
    assert (tmp_path / "repo/README.md").read_text() == "first"
    monkeypatch.undo()
    export_model(model, tmp_path / "repo", card="second", force=True)
    assert (tmp_path / "repo/README.md").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


def test_only_models_of_ours_are_exported(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.config = None
    with pytest.raises(ValueError, match="Linear is not a Blockformer model"):
        export_model(model, tmp_path / "repo")
    assert list(tmp_path.iterdir()) == []


def test_public_names_are_found_late():
    assert blockformer.export_model is export_model
    assert blockformer.from_official.__name__ == "from_official"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = blockformer.nonsense
    assert set(blockformer.__all__) <= set(dir(blockformer))


def test_the_wheel_carries_every_package():
    """`packages` in pyproject.toml is written by hand: a folder that it forgets is missing from the wheel alone."""
    root = Path(__file__).parents[2]
    listed = re.search(r"^packages = \[(.*?)\]", (root / "pyproject.toml").read_text(), re.M | re.S)[1]
    wanted = {"blockformer", "blockformer.conversion", "blockformer.model_cards"}
    for path in (root / "src").rglob("__init__.py"):
        wanted.add(".".join(path.parent.relative_to(root / "src").parts))
    for path in (root / "conversion").rglob("__init__.py"):
        wanted.add(".".join(("blockformer", *path.parent.relative_to(root).parts)))
    assert wanted == set(re.findall(r'"(.*?)"', listed))


@pytest.mark.versions
def test_plain_save_pretrained_carries_all_code_and_the_full_auto_map(tmp_path, model):
    model.save_pretrained(tmp_path / "repo")
    names = {path.name for path in (tmp_path / "repo").iterdir()}
    assert code_files(model.config).keys() <= names
    entries = json.loads((tmp_path / "repo/config.json").read_text())
    assert entries["auto_map"] == full_auto_map(model.config)
    model.model.save_pretrained(tmp_path / "base")
    assert code_files(model.config).keys() <= {path.name for path in (tmp_path / "base").iterdir()}
    assert json.loads((tmp_path / "base/config.json").read_text())["auto_map"] == full_auto_map(model.config)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3", "BlockformerDecoderForCausalLM"),
        ("bert", "BlockformerEncoderForMaskedLM"),
        ("t5", "BlockformerEncoderDecoderModel"),
    ],
)
def test_every_repo_of_a_topology_has_the_same_code_however_it_is_written(tmp_path, name, kind):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
    model = getattr(blockformer, kind)(blockformer.preset(name, vocab_size=30, pad_token_id=0, **sizes))
    model.save_pretrained(tmp_path / "plain")
    export_model(model, tmp_path / "export")
    model.config.save_pretrained(tmp_path / "config")
    (tmp_path / "copy").mkdir()
    copy_code(tmp_path / "copy", model.config)
    wanted = {name: path.read_bytes() for name, path in code_files(model.config).items()}
    for written in tmp_path.iterdir():
        assert {path.name: path.read_bytes() for path in written.glob("*.py")} == wanted, written


OF_STATES = ("blocks.py", "delta_rule.py", "hybrid.py", "scaled_feed_forward.py", "state_space.py", "states.py")


def test_the_name_of_a_folder_is_not_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"str is not a Blockformer model: load it first\."):
        export_model("folder", tmp_path / "export")


@pytest.mark.parametrize("name", ["qwen3", "lfm2", "qwen3_5_text", "bamba", "falcon_h1"])
def test_a_card_says_how_large_a_state_is(tmp_path, name):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    model = blockformer.BlockformerDecoderForCausalLM(blockformer.preset(name, **sizes, num_attention_heads=2))
    export_model(model, tmp_path / "repo")
    card = (tmp_path / "repo" / "README.md").read_text()
    found = re.search(r"Layers with a state keep (.*) in float32 or (.*) in bfloat16 of a text, however long", card)
    assert (found is None) is (name == "qwen3")
    if found is not None:
        assert found.groups() == tuple(format_size(state_bytes(model, size)) for size in (4, 2))


def test_the_code_of_a_repo_can_be_read_in_an_afternoon(tmp_path):
    """Of every preset, with every part that it uses."""
    for name in blockformer.preset():
        paths = {*code_files(blockformer.preset(name)).values()}  # the stand-in of parts that are left out once
        lines = {path.name: len(path.read_text().splitlines()) for path in paths}
        states = sum(lines.get(file, 0) for file in OF_STATES)
        assert sum(lines.values()) - states <= 3500, name


@pytest.mark.parametrize("name", ["qwen3", "bert", "t5"])
def test_the_code_of_a_repo_is_closed_and_has_no_side_effects(tmp_path, name):
    config = blockformer.preset(name)
    copied = copy_code(tmp_path, config)
    names = {path.stem for path in copied}
    (main,) = {target.partition(".")[0] for key, target in full_auto_map(config).items() if key != "AutoConfig"}
    assert main in names
    assert not names & {"api", "cli", "__init__", "on_import", "presets", "publishing", "training"}
    # Old loaders follow the entry file's own imports only, whether they begin with the model or with the config.
    for entry in (main, full_auto_map(config)["AutoConfig"].partition(".")[0]):
        tree = ast.parse((tmp_path / f"{entry}.py").read_text())
        direct = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
        assert direct == names - {entry}
    for path in copied:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {name.partition(".")[0] for name in imported} & FORBIDDEN_MODULES, ast.unparse(node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{path.name}: {ast.unparse(node)}"
                if node.func.id == "open":
                    modes = [mode.value for mode in node.args[1:]]
                    assert modes in ([], ["rb"]), f"{path.name}: {ast.unparse(node)}"
                    assert {word.arg for word in node.keywords} <= {"encoding"}, f"{path.name}: {ast.unparse(node)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in FORBIDDEN_METHODS, f"{path.name}: {ast.unparse(node)}"
        text = path.read_text()
        assert not re.search(r"torch\._C|torch\.ops|os\.environ|perf_counter|^import time", text, re.M), path.name
        assert "import blockformer" not in text
        assert "from blockformer" not in text
        # The loader finds imports line by line, also in docstrings.
        for line in text.splitlines():
            if line.strip().startswith("from .") and " import " in line:
                assert line.split()[1].strip(".") in names, f"{path.name}: {line}"


def test_a_core_that_a_repo_could_not_carry_is_refused(tmp_path, monkeypatch):
    for text, message in (
        ("import numpy\n", "may not import 'numpy'"),
        ("from blockformer.x import y\n", "may not import 'blockformer'"),
        ("from . import attention\n", "only `from .name import x` works"),
        ("from .sub.part import x\n", "only `from .name import x` works"),
        ("from ..up import x\n", "only `from .name import x` works"),
    ):
        (tmp_path / "modeling_decoder.py").write_text(text)
        (tmp_path / "configuration_decoder.py").write_text("")
        monkeypatch.setattr("blockformer.publishing.repo_code.MODEL", tmp_path)
        with pytest.raises(RuntimeError, match=message):
            code_files(blockformer.preset("qwen3"))


@pytest.mark.parametrize(
    ("name", "tag", "auto"),
    [
        ("BlockformerDecoderModel", "feature-extraction", "AutoModel"),
        ("BlockformerDecoderForSequenceClassification", "text-classification", "AutoModelForSequenceClassification"),
        ("BlockformerDecoderForTokenClassification", "token-classification", "AutoModelForTokenClassification"),
        ("BlockformerDecoderForQuestionAnswering", "question-answering", "AutoModelForQuestionAnswering"),
    ],
)
def test_the_card_fits_the_task(tmp_path, name, tag, auto):
    config = blockformer.preset("qwen3", **PUBLISHED, sliding_window=4)
    config.architectures = [name]
    (tmp_path / "tokenizer.json").touch()
    card = write_card(tmp_path, config, origin="Made of $1 | sense.", base_model="a/b", parity="equal").read_text()
    assert f"pipeline_tag: {tag}\n" in card
    assert "base_model: a/b\n" in card
    assert f"import {auto}, AutoTokenizer" in card
    assert "Made of $1 | sense." in card
    assert "| `layer_types` | 2 x sliding_attention |" in card
    assert "num_experts" not in card


def test_tokenizers_are_saved_for_older_tools_too(tmp_path, tiny_tokenizer):
    save_tokenizer(tiny_tokenizer, tmp_path)
    entries = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert entries["tokenizer_class"] == "PreTrainedTokenizerFast"
    again = type(tiny_tokenizer).from_pretrained(tmp_path)
    assert again("import heapq").input_ids == tiny_tokenizer("import heapq").input_ids


def test_a_tokenizer_is_taken_by_its_folder_and_refused_with_tokens_that_the_model_has_not(tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    largest = max(tiny_tokenizer.get_vocab().values())
    for name, size in (("fits", largest + 1), ("small", largest)):
        config = blockformer.BlockformerDecoderConfig(**{**TINY, "vocab_size": size})
        model = blockformer.BlockformerDecoderForCausalLM(config)
        for tokenizer in (tiny_tokenizer, tmp_path / "tokenizer", str(tmp_path / "tokenizer")):
            if name == "small":
                with pytest.raises(ValueError, match=f"a token {largest}, the model's vocabulary 0 to {largest - 1}"):
                    blockformer.export_model(model, tmp_path / name, tokenizer)
                assert not (tmp_path / name).exists()
            else:
                blockformer.export_model(model, tmp_path / name, tokenizer, force=True)
                assert (tmp_path / name / "tokenizer.json").is_file()
