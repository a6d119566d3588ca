"""`verify`: a repo as written passes, and each way to spoil one is named."""

import json
import os
import pickle
import shutil
import sys

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file

import blockformer
from blockformer import verify
from blockformer.cli import main
from blockformer.conversion import ConversionError
from blockformer.trust import manifest, verification

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
KINDS = {
    "qwen3": "BlockformerDecoderForCausalLM",
    "gpt2": "BlockformerDecoderForSequenceClassification",
    "bert": "BlockformerEncoderForMaskedLM",
    "electra": "BlockformerEncoderForReplacedTokenDetection",
    "t5": "BlockformerEncoderDecoderForConditionalGeneration",
}


def made(name, folder, **more):
    start = {"decoder_start_token_id": 0} if name == "t5" else {}
    config = blockformer.preset(name, **SIZES, **TOKENS, **start, **more)
    return blockformer.export_model(getattr(blockformer, KINDS[name])(config), folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return made("qwen3", tmp_path_factory.mktemp("repos") / "repo")


@pytest.fixture
def repo(written, tmp_path):
    return shutil.copytree(written, tmp_path / "repo")


def edit(path, **entries):
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize("name", KINDS)
def test_a_repo_as_it_is_written_is_right(name, tmp_path):
    found = verify(made(name, tmp_path / "repo"))
    assert found.problems == {}
    assert found.is_ok
    assert found.notes == []
    assert (found.release, found.format) == (blockformer.__version__, 1)
    assert found.files.keys() == {path.name for path in (tmp_path / "repo").iterdir()}


def test_a_part_that_only_some_configs_need_is_code_of_the_release(tmp_path):
    kinds = ["linear_attention", "full_attention"]
    repo = made("qwen3", tmp_path / "repo", layer_types=kinds)
    found = verify(repo)
    assert found.is_ok
    card = (repo / "README.md").read_text()
    assert "`delta_rule.py`, `states.py`" in card
    assert "is its author's" not in card
    assert {"delta_rule.py", "states.py", "blocks.py", "with_blocks.py"} <= found.files.keys()
    assert (found.blocks, found.to_read) == ({}, [])
    # Of another release, in which the file differs, the config is read all the same.
    edit(repo / "config.json", blocks={"delta_rule.py": 64 * "0", "states.py": 64 * "0"})
    assert blockformer.BlockformerDecoderConfig.from_pretrained(repo).layer_types == kinds
    assert blockformer.upgrade(repo).is_ok
    assert json.loads((repo / "config.json").read_text())["blocks"]["states.py"] != 64 * "0"
    (repo / "states.py").write_text("import os\n")
    assert "states.py differs from release" in verify(repo).problems["code"][0]
    (repo / "states.py").unlink()
    assert verify(repo).problems["code"] == ["states.py is missing"]
    edit(repo / "config.json", blocks={"attention.py": 64 * "0"})
    assert any("blocks must name files of its author's" in problem for problem in verify(repo).problems["code"])


def test_weights_of_4_bits_shards_and_a_bare_save_are_right(tmp_path):
    made("qwen3", tmp_path / "low", linear_bits=4, linear_group_size=8)
    assert verify(tmp_path / "low").is_ok
    config = blockformer.preset("gpt2", **SIZES, **TOKENS)
    model = blockformer.BlockformerDecoderForCausalLM(config)
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    assert verify(tmp_path / "shards").is_ok


def flip(folder):
    path = folder / "attention.py"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:9], lines[9].rstrip("\n") + " \n", *lines[10:]]))


def link(folder):
    (folder / "stack.py").rename(folder.parent / "elsewhere.py")
    (folder / "stack.py").symlink_to(folder.parent / "elsewhere.py")


def zipped(folder):
    torch.save({"a": torch.zeros(1)}, folder / "harmless.dat")


def plain_pickle(folder):
    (folder / "notes.txt").write_bytes(pickle.dumps({"a": 1}, protocol=4))


def shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(17)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def weights(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NORM = "model.norm.weight"
FAULTS = {
    "one byte of the code": ("code", flip, r"attention\.py differs from release .*, from line 10 on"),
    "code that is missing": ("code", lambda f: (f / "rotary.py").unlink(), r"rotary\.py is missing"),
    "code beside it": ("code", lambda f: (f / "extra.py").write_text(""), r"'extra\.py' is not code of Blockformer"),
    "code in a folder": (
        "code",
        lambda f: ((f / "custom_generate").mkdir(), (f / "custom_generate/generate.py").write_text("")),
        r"custom_generate/generate\.py differs from release",
    ),
    "code of another topology": (
        "code",
        lambda f: shutil.copy(f / "axes.py", f / "beams.py"),
        "'beams.py' is not code",
    ),
    "a library": ("code", lambda f: (f / "fast.so").write_bytes(b"\x7fELF"), r"'fast\.so' is not code"),
    "a notebook": ("code", lambda f: (f / "sub.ipynb").write_text("{}"), r"'sub\.ipynb' is not code"),
    "compiled Python": (
        "code",
        lambda f: ((f / "__pycache__").mkdir(), (f / "__pycache__/stack.cpython-311.pyc").write_bytes(b"\0")),
        r"'__pycache__/stack\.cpython-311\.pyc' is not code",
    ),
    "no release": (
        "code",
        lambda f: edit(f / "config.json", blockformer_version=None),
        "config.json names no release: .* `blockformer upgrade`",
    ),
    "a later release": (
        "code",
        lambda f: edit(f / "config.json", blockformer_version="7.1.0"),
        r"release '7\.1\.0' is not known to Blockformer .*: install blockformer 7\.1\.0 or later",
    ),
    "a release that never was": (
        "code",
        lambda f: edit(f / "config.json", blockformer_version="../../x"),
        r"release '\.\./\.\./x' is not known to Blockformer [\d.]+\nnothing vouches for 'alibi\.py', ",
    ),
    "another format": ("code", lambda f: edit(f / "config.json", blockformer_format=0), "says format '0'"),
    "a link out of the repo": ("files", link, r"'stack\.py' is a link that leaves the folder"),
    "a link to nothing": ("files", lambda f: (f / "x.txt").symlink_to("nowhere"), r"'x\.txt' cannot be read"),
    "a linked folder": ("files", lambda f: (f / "sub").symlink_to(f.parent), "'sub/' is a linked folder"),
    "a pipe": ("files", lambda f: os.mkfifo(f / "pipe"), "'pipe' is not a regular file"),
    "a pickle by name": (
        "files",
        lambda f: (f / "training_args.bin").write_bytes(b"x"),
        "training_args.bin' is a pickle",
    ),
    "a pickle by content": ("files", plain_pickle, r"'notes\.txt' is a pickle"),
    "a pickle in an archive": ("files", zipped, r"'harmless\.dat' is a pickle"),
    "a tokenizer's own code": (
        "settings",
        lambda f: (f / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["a.B", null]}}'),
        r"tokenizer_config\.json: auto_map names code to load",
    ),
    "code on the Hub": (
        "settings",
        lambda f: edit(f / "config.json", auto_map={"AutoModel": "a/b--modeling_decoder.BlockformerDecoderModel"}),
        "auto_map names 'a/b--modeling_decoder",
    ),
    "a class of another module": (
        "settings",
        lambda f: edit(f / "config.json", auto_map={"AutoModel": "evil.BlockformerDecoderModel"}),
        r"auto_map names 'evil\.Block",
    ),
    "a kernel of the Hub": (
        "settings",
        lambda f: edit(f / "generation_config.json", attn_implementation="somebody/kernel"),
        "attn_implementation names code to load",
    ),
    "a nested entry": (
        "settings",
        lambda f: (f / "processor_config.json").write_text('{"a": [{"auto_map": {"x": "y.Z"}}]}'),
        r"processor_config\.json: auto_map",
    ),
    "a way to generate": (
        "settings",
        lambda f: edit(f / "generation_config.json", custom_generate="x"),
        "custom_generate names code to load",
    ),
    "a template that leaves its sandbox": (
        "settings",
        lambda f: (f / "chat_template.jinja").write_text("{{ ''.__class__ }}"),
        "the chat template has '__'",
    ),
    "a template that reads a file": (
        "settings",
        lambda f: (f / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{%- include 'x' %}"})),
        "the chat template has '{%- include'",
    ),
    "a module of a stranger": (
        "settings",
        lambda f: (f / "modules.json").write_text('[{"idx": 0, "type": "evil.Module"}]'),
        r"'evil\.Module' is not a module of sentence-transformers",
    ),
    "a template by its name": (
        "settings",
        lambda f: (f / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"default": "{{ x.__a__ }}"}})),
        "the chat template has '__'",
    ),
    "a template in capitals": (
        "settings",
        lambda f: (f / "chat_template.JINJA").write_text("{{ ''.__class__ }}"),
        "the chat template has '__'",
    ),
    "settings in capitals": (
        "settings",
        lambda f: (f / "Tokenizer_Config.JSON").write_text('{"auto_map": {"AutoTokenizer": ["a.B", null]}}'),
        "auto_map names code to load",
    ),
    "a name in capitals": (
        "files",
        lambda f: shutil.copy(f / "model.safetensors", f / "Model.safetensors"),
        "'Model.safetensors' and 'model.safetensors' are one file on some systems",
    ),
    "a letter in two ways": (
        "files",
        lambda f: [(f / name).write_text("x") for name in ("caf\u00e9.txt", "cafe\u0301.txt")],
        "are one file on some systems",
    ),
    **{
        f"the name {name!r}": (
            "files",
            lambda f, name=name: (f / name).write_text("x"),
            "a name that not every system can have",
        )
        for name in ("evil.py.", "evil.py ", "notes.txt:evil.py:$DATA", "a\\b.txt", "x\u202egpj.txt", "a\nb.txt")
    },
    "lines as on Windows": (
        "code",
        lambda f: (f / "attention.py").write_bytes((f / "attention.py").read_bytes().replace(b"\n", b"\r\n")),
        r"attention\.py differs from release .*: its lines end as on Windows; .* core\.autocrlf false",
    ),
    "JSON twice": ("settings", lambda f: (f / "x.json").write_text('{"a": 1, "a": 2}'), "not valid JSON"),
    "a weight that is missing": ("weights", lambda f: weights(f, **{NORM: None}), "model.norm.weight is missing"),
    "a weight too many": ("unused", lambda f: weights(f, **{"x.y": torch.zeros(1)}), "'x.y' is not a weight of Block"),
    "a weight of another shape": (
        "weights",
        lambda f: weights(f, **{NORM: torch.zeros(17)}),
        r"model\.norm\.weight is \[17\], the config says \[16\]",
    ),
    "a weight of integers": ("weights", lambda f: weights(f, **{NORM: torch.zeros(16).int()}), "is torch.int32"),
    "no weights": ("weights", lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "a damaged file of weights": ("weights", lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "safetensors"),
    "a class that is not ours": (
        "weights",
        lambda f: edit(f / "config.json", architectures=["preset"]),
        "architectures names 'preset', which is not a model",
    ),
    "a size that does not fit": ("weights", lambda f: edit(f / "config.json", hidden_size="16"), "hidden_size must be"),
}


@pytest.mark.parametrize(
    "code", ["evil.BlockformerDecoderModel", "former.Model", "a/b--former.BlockformerDecoderModel"]
)
def test_auto_map_of_an_unknown_release_names_the_repo_s_modules_and_our_classes_only(repo, code):
    (repo / "former.py").write_text("")
    edit(repo / "config.json", blockformer_version=None, auto_map={"AutoModel": "former.BlockformerDecoderModel"})
    found = blockformer.verify(repo)
    assert "settings" not in found.problems
    assert "'former.py'" in found.problems["code"][1]
    edit(repo / "config.json", auto_map={"AutoModel": code})
    assert f"auto_map names '{code}'" in blockformer.verify(repo).problems["settings"][0]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_named_and_nothing_else(fault, repo):
    kind, spoil, message = FAULTS[fault]
    spoil(repo)
    found = verify(repo)
    others = {"files": {"code"}, "code": set(), "settings": set(), "weights": set(), "unused": set()}[kind]
    assert {kind} <= found.problems.keys() <= {kind} | (others if fault == "a link out of the repo" else set())
    with pytest.raises(AssertionError, match=message):  # the whole list, searched
        raise AssertionError("\n".join(found.problems[kind]))


def test_what_is_no_repo_of_ours_is_refused(tmp_path):
    for content in (None, "[1]", "{", '{"model_type": "bert"}', '{"model_type": ["blockformer_decoder"]}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConversionError, match="not a repo of Blockformer"):
            verify(tmp_path)
    with pytest.raises(ConversionError, match="no such folder"):
        verify(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(ConversionError, match="no revision"):
        verify(tmp_path, revision="main")


def test_a_fine_tuned_checkpoint_tells_what_it_holds(repo):
    (repo / "optimizer.pt").write_bytes(b"")
    (repo / "adapter_config.json").write_text("{}")
    (repo / ".git").mkdir()
    found = verify(repo)
    assert found.problems.keys() == {"files"}
    assert len(found.notes) == 2


def test_a_hub_id_is_downloaded_whole_and_the_cache_s_links_are_fine(written, tmp_path, monkeypatch):
    home = tmp_path / "models--somebody--repo"
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for path in written.iterdir():
        shutil.copy(path, home / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    asked = []

    def download(repo_id, revision=None):
        asked.append((repo_id, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert snapshot_download is not download
    found = verify("somebody/repo", revision="v1")
    assert found.problems == {}
    assert asked == [("somebody/repo", "v1")]

    def refuse(repo_id, revision=None):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConversionError, match=r"no folder of that name, and it could not be fetched .*; unset it, or name a folder"
    ):
        verify("somebody/repo")


@pytest.mark.parametrize("size", [640, 896, 1152, 1408])
def test_a_header_that_begins_like_a_pickle_is_a_header(size, repo):
    """A safetensors file begins with the size of its header: 640 is the bytes 0x80 0x02."""
    path = repo / "notes.safetensors"
    save_file({"x": torch.zeros(1)}, path, {"pad": ""})
    header = int.from_bytes(path.read_bytes()[:8], "little")
    save_file({"x": torch.zeros(1)}, path, {"pad": "." * (size - header)})
    assert path.read_bytes()[:2] == size.to_bytes(2, "little")
    assert verify(repo).problems == {}


def test_more_files_than_are_listed_are_a_problem(repo, monkeypatch):
    monkeypatch.setattr("blockformer.files.sources.LISTED", 12)
    monkeypatch.setattr(verification, "LISTED", 12)
    assert "more than 12 files" in verify(repo).problems["files"][0]


def test_nothing_of_the_repo_is_run(repo, tmp_path):
    (repo / "modeling_decoder.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\n")
    (repo / "sitecustomize.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\n")
    assert not verify(repo).is_ok
    assert not (tmp_path / "run").exists()


def test_names_that_a_source_had_are_kept_as_they_are(repo):
    (repo / "conversion/source").mkdir(parents=True)
    (repo / "conversion/source/results: final?.json").write_text("{}")
    assert verify(repo).is_ok


@pytest.mark.parametrize("entry", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_that_the_config_names_is_not_loaded(entry, repo, monkeypatch):
    """Building the class would have fetched it from the Hub and run it."""
    loads = [module for module in sys.modules.values() if "load_and_register_attn_kernel" in vars(module)]
    assert loads
    for module in loads:
        monkeypatch.setattr(module, "load_and_register_attn_kernel", lambda *_, **__: pytest.fail("a kernel is loaded"))
    edit(repo / "config.json", **{entry: "somebody/kernel"})
    found = verify(repo)
    assert found.problems.keys() == {"settings"}
    assert f"config.json: {entry} names code to load" in found.problems["settings"][0]


def test_the_command_reports_and_its_status_tells(repo, capsys):
    for arguments in (["verify", str(repo)], ["verify", str(repo), "--json"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert not end.value.code
    text = capsys.readouterr().out
    assert f"written by Blockformer {blockformer.__version__}, format 1" in text
    report = json.loads(text[text.index("{\n") :])
    assert report["ok"] is True
    assert report["files"].keys() == {path.name for path in repo.iterdir()}
    flip(repo)
    with pytest.raises(SystemExit) as end:
        main(["verify", str(repo), "--json"])
    assert end.value.code == 1
    assert json.loads(capsys.readouterr().out)["problems"].keys() == {"code"}
    with pytest.raises(SystemExit) as end:
        main(["verify", str(repo)])
    assert end.value.code == 1
    assert "    attention.py differs from release" in capsys.readouterr().out


def test_a_release_of_before_is_compared_with_its_manifest(repo, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "FOLDER", tmp_path / "manifests")
    (tmp_path / "manifests").mkdir()
    before = manifest.installed()
    flip(repo)
    flip_sum = verification.digest(repo / "attention.py")
    files = {**before.files, "attention.py": flip_sum}
    earlier = manifest.Manifest("0.0.9", 1, files, before.topologies, before.stand_ins)
    (tmp_path / "manifests" / "0.0.9.json").write_text(earlier.text())
    assert verify(repo).problems.keys() == {"code"}
    edit(repo / "config.json", blockformer_version="0.0.9")
    found = verify(repo)
    assert found.problems == {}
    assert found.release == "0.0.9"
    edit(repo / "config.json", blockformer_version="0.0.8")
    assert "release '0.0.8' is not known" in verify(repo).problems["code"][0]
