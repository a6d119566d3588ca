"""What must never hurt a user, at the level of whole conversions; smaller parts have tests of their own."""

import json
import os
import sys
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
import torch
from fork_server import program
from safetensors.torch import load_file, save_file

from blockformer.conversion import ConversionError, convert
from blockformer.files.errors import is_out_of_memory, memory_errors
from blockformer.files.sources import locate

from .oracles import edit_config, fingerprint, official_folder

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and forks")


@pytest.fixture
def source(tmp_path):
    official_folder(tmp_path / "source", shards=True)
    return tmp_path / "source"


def only_the_source_is_there(folder):
    assert [path.name for path in folder.iterdir()] == ["source"]


def test_an_existing_target_is_refused_and_with_force_replaced(tmp_path, source):
    convert(source, tmp_path / "dst", verify=False)
    before = fingerprint(tmp_path)
    with pytest.raises(ConversionError, match="already exists"):
        convert(source, tmp_path / "dst", verify=False)
    assert fingerprint(tmp_path) == before
    convert(source, tmp_path / "dst", verify=False, force=True, dtype="bfloat16")
    assert json.loads((tmp_path / "dst/config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "source"]


def test_a_failure_with_force_leaves_the_old_target(tmp_path, source):
    convert(source, tmp_path / "dst", verify=False)
    before = fingerprint(tmp_path / "dst")
    os.remove(next(source.glob("*.safetensors")))
    with pytest.raises(ConversionError, match="files are missing"):
        convert(source, tmp_path / "dst", verify=False, force=True)
    assert fingerprint(tmp_path / "dst") == before


@pytest.mark.parametrize("place", ["source", "source/dst", "."])
@pytest.mark.parametrize("force", [False, True])
def test_same_and_nested_folders_are_refused(tmp_path, source, place, force):
    before = fingerprint(tmp_path)
    with pytest.raises(ConversionError):
        convert(source, tmp_path / place, verify=False, force=force)
    assert fingerprint(tmp_path) == before


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path, source):
    def touch(step, done, total):
        if done == total > 0:
            path = source / "config.json"
            path.write_text(path.read_text() + " ")

    with pytest.raises(ConversionError, match=r"config\.json: changed while it was read"):
        convert(source, tmp_path / "dst", verify=False, progress=touch)
    only_the_source_is_there(tmp_path)


def test_a_shard_that_changes_meanwhile_is_noticed(tmp_path, source):
    shard = sorted(source.glob("*.safetensors"))[-1]

    def touch(step, done, total):
        if 0 < done < total:
            os.utime(shard, (1, 1))

    with pytest.raises(ConversionError, match="changed while it was read"):
        convert(source, tmp_path / "dst", verify=False, progress=touch)
    only_the_source_is_there(tmp_path)


def test_an_index_without_metadata_is_compared_too(tmp_path, source):
    """The official class does not read it."""
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    report = convert(source, tmp_path / "dst")
    assert report.parity.measured
    assert report.parity.passed
    assert convert(tmp_path / "dst", tmp_path / "back", to_official=True).parity.passed


def test_everything_wrong_with_the_tensors_is_listed_before_anything_is_written(tmp_path):
    official_folder(tmp_path / "source")
    path = tmp_path / "source/model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.surprise.weight"] = torch.zeros(2)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(7, 64)
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int32)
    save_file(tensors, path)
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "source", tmp_path / "dst")
    for part in (
        "layers.0.mlp.up_proj.weight",
        "surprise",
        "layers.1.mlp.up_proj.weight' is [7, 64], the model's is [96, 64]",
        "model.norm.weight' is torch.int32",
    ):
        assert part in str(caught.value)
    only_the_source_is_there(tmp_path)


def test_too_many_layers_in_the_checkpoint_are_not_dropped(tmp_path, source):
    edit_config(source, num_hidden_layers=1, layer_types=...)
    with pytest.raises(ConversionError, match=r"no place for[\s\S]*layers\.1\."):
        convert(source, tmp_path / "dst")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_not_ignored(tmp_path, source, name):
    (source / name).write_text("{}")
    with pytest.raises(ConversionError, match=r"an adapter .* is next to whole weights"):
        convert(source, tmp_path / "dst")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json"])
def test_malformed_json_is_an_error(tmp_path, source, name):
    (source / name).write_text('{"a": 1, "a": 2}')
    with pytest.raises(ConversionError, match="'a' appears twice"):
        convert(source, tmp_path / "dst", verify=False)
    only_the_source_is_there(tmp_path)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_a_lfs_pointer_in_place_of_a_tokenizer_is_said_so(tmp_path, source):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 466247\n"
    (source / "tokenizer.json").write_text(pointer)
    with pytest.raises(ConversionError, match=r"tokenizer\.json: a git-LFS pointer, not the file itself"):
        convert(source, tmp_path / "dst", verify=False)
    only_the_source_is_there(tmp_path)


def test_a_tokenizer_file_that_leads_out_of_the_folder_is_refused(tmp_path, source):
    secret = tmp_path / "source-secret"
    secret.write_text("secret")
    (source / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ConversionError, match="leaves the folder"):
        convert(source, tmp_path / "dst", verify=False)
    assert not (tmp_path / "dst").exists()


def test_a_name_that_is_no_folder_gives_one_clear_sentence(tmp_path):
    with pytest.raises(ConversionError, match=r"no such folder$"):
        convert(tmp_path / "nowhere", tmp_path / "dst")
    with pytest.raises(ConversionError, match="could not be fetched from the Hugging Face Hub") as caught:
        locate("nobody/nothing-at-all")
    assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match="not a folder"):
        convert(tmp_path / "file", tmp_path / "dst")
    with pytest.raises(ConversionError, match="a folder, which has no revision 'v1'"):
        convert(tmp_path, tmp_path / "dst", revision="v1")
    for bad in ("../x", "a/b/c", "a b"):
        with pytest.raises(ConversionError, match=r"no such folder$"):
            locate(bad)
    with pytest.raises(ConversionError, match="name of the source is empty"):
        locate("")


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "the repo on the Hub is 'Qwen/Qwen3-0.6B'$"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "'Qwen/Qwen3-0.6B'$"),
        ("hf://Qwen/Qwen3-0.6B/", "'Qwen/Qwen3-0.6B'$"),
        ("Qwen/Qwen3-0.6B@v1", r"'Qwen/Qwen3-0.6B', with revision 'v1' \(--revision\)$"),
        ("Qwen/Qwen3-0.6B/blob/v1/config.json", r"'Qwen/Qwen3-0.6B', with revision 'v1' \(--revision\)$"),
    ],
)
def test_the_address_of_a_repo_is_answered_with_its_id(address, meant):
    with pytest.raises(ConversionError, match=f"no such folder; .*{meant}"):
        locate(address)


def test_a_folder_under_another_name_is_answered_with_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    for name in ("~/model", (tmp_path / "model").as_uri()):
        with pytest.raises(ConversionError, match=f"no such folder; write {tmp_path}/model"):
            locate(name)


def test_why_nothing_could_be_fetched_is_said(monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants, errors

    raised = []

    def fetch(*arguments, **hub):
        raise raised[-1]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fetch)
    response = SimpleNamespace(headers={}, request=None)
    for offline, error, words in [
        (False, errors.LocalEntryNotFoundError("no"), f"{constants.ENDPOINT} cannot be reached"),
        (False, ConnectionError("no"), "are you offline?"),
        (True, errors.LocalEntryNotFoundError("no"), "HF_HUB_OFFLINE is set"),
        (False, errors.GatedRepoError("no", response=response), "grant you access"),
        (False, errors.RepositoryNotFoundError("no", response=response), "no repo has that name"),
        (False, errors.RevisionNotFoundError("no", response=response), "no revision 'v9'"),
        (False, KeyError("no"), "KeyError; check the name"),
    ]:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        raised.append(error)
        with pytest.raises(ConversionError) as caught:
            locate("ann/small", revision="v9")
        assert words in str(caught.value)


def a_hub_with(monkeypatch, folder, *more):
    """Answer as a Hub that has one repo: the files of a folder, and more names. Returns the names that were fetched."""
    import huggingface_hub

    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    asked = []

    def fetch(hub_id, allow_patterns, revision, **hub):
        assert (hub_id, revision) == ("somebody/model", "c0ffee")
        asked.extend(name for name in (*names, *more) if any(fnmatch(name, pattern) for pattern in allow_patterns))
        return str(folder)

    sizes = {name: (folder / name).stat().st_size for name in names} | dict.fromkeys(more, 1 << 40)
    info = SimpleNamespace(
        sha="c0ffee", siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *arguments, **hub: info)
    return asked


def test_of_a_hub_repo_only_what_is_read_is_fetched(tmp_path, source, monkeypatch):
    more = [
        "original/consolidated.safetensors",
        "original/config.json",
        "consolidated.safetensors",
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "modeling_own.py",
        "onnx/model.onnx",
        "onnx/tokenizer.json",
        "model.gguf",
        "train.txt",  # of a terabyte
    ]
    asked = a_hub_with(monkeypatch, source, *more)
    report = convert("somebody/model", tmp_path / "dst", verify=False)
    assert report.source == "somebody/model"
    assert sorted(asked) == sorted(path.name for path in source.iterdir())
    assert sorted(name for names in report.left_out.values() for name in names) == sorted(more)
    card = (tmp_path / "dst/README.md").read_text()
    assert "base_model: somebody/model" in card
    assert "- code, which is never carried: `modeling_own.py`" in card
    record = json.loads((tmp_path / "dst/conversion.json").read_text())["files"]
    assert record["left_out"] == report.left_out


@pytest.mark.parametrize("kept", ["model.safetensors", "pytorch_model.bin"])
def test_the_first_kind_of_weights_is_fetched(tmp_path, kept, monkeypatch):
    official_folder(tmp_path / "source")
    if kept == "pytorch_model.bin":
        torch.save(load_file(tmp_path / "source/model.safetensors"), tmp_path / "source" / kept)
        (tmp_path / "source/model.safetensors").unlink()
    asked = a_hub_with(monkeypatch, tmp_path / "source", "model-x.safetensors", "training_args.bin", "tf_model.h5")
    convert("somebody/model", tmp_path / "dst", verify=False)
    assert [name for name in asked if name.endswith((".safetensors", ".bin", ".h5"))] == [kept]


@pytest.fixture
def scenarios(processes, tmp_path):
    """Runs scenarios of `interrupted_conversion` in the test's folder: a name and its arguments each."""

    def run(*wanted):
        done = processes.run(
            program("interrupted_conversion"), tmp_path, json.dumps(wanted), folder=tmp_path, elsewhere=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"code"')]

    return run


# Progress is told at the beginning, for each of 25 tensors, before each of two model runs, and at the end.
POINTS = [1, 2, 15, 26, 27, 28, 29]


@needs_linux
def test_ctrl_c_cleans_up_and_exits_130(tmp_path, scenarios, source):
    before = fingerprint(source)
    *runs, last = scenarios(*(("interrupted", point) for point in POINTS), ("terminated", 15))
    for run in runs:
        assert run["code"] == 130, run["text"]
        assert run["text"].strip().splitlines()[-1] == "interrupted"
        assert "Traceback" not in run["text"]
        assert run["left"] == ["source"]
    assert last["code"] == 143
    assert last["left"] == ["source"]
    assert fingerprint(source) == before


@needs_linux
def test_kill_9_leaves_the_old_target_or_the_new_one(tmp_path, scenarios, source):
    convert(source, tmp_path / "dst", verify=False, dtype="bfloat16")
    old, before = fingerprint(tmp_path / "dst"), fingerprint(source)
    runs = scenarios(*(("killed", point) for point in POINTS))
    assert [run["code"] for run in runs] == [-9] * len(POINTS)
    assert all(len([name for name in run["left"] if name in ("source", "dst")]) == 2 for run in runs)
    assert any(name.endswith(".tmp") for run in runs for name in run["left"])
    assert fingerprint(tmp_path / "dst") == old
    assert fingerprint(source) == before
    convert(source, tmp_path / "dst", verify=False, force=True)
    assert json.loads((tmp_path / "dst/config.json").read_text())["dtype"] == "float32"


@needs_linux
def test_memory_limits(tmp_path, scenarios, source):
    """Peak memory is that of one tensor, not of the checkpoint; too little of it is a clean failure."""
    sizes = {"vocab_size": 12_000, "hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 5}
    official_folder(tmp_path / "big", **sizes, initializer_range=0.02)
    total = (tmp_path / "big/model.safetensors").stat().st_size
    largest = 12_000 * 512 * 4
    assert total > 5 * largest
    run, other = scenarios(("little_memory",), ("peak",))
    assert run["code"] == 1, run["text"]
    assert run["text"].startswith("error: "), run["text"]
    assert "memory" in run["text"]
    assert "Traceback" not in run["text"]
    assert run["left"] == ["big", "source"]
    assert other["code"] == 0, other["text"]
    peak = json.loads(other["text"].splitlines()[-1])
    assert peak < 1.5 * largest + (32 << 20), f"{peak / 2**20:.0f} MiB for tensors of {largest / 2**20:.0f} MiB"


def test_nothing_of_the_source_is_run_and_nothing_written_elsewhere(tmp_path, processes, source, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(source)
    planted = f"open({str(tmp_path / 'PLANTED')!r}, 'w').write('run')\n"
    for name in ("evil.py", "modeling_evil.py", "modeling_qwen3.py", "__init__.py", "setup.py", "sitecustomize.py"):
        (source / name).write_text(planted)
    (source / "custom_generate").mkdir()
    (source / "custom_generate/generate.py").write_text(planted + "def generate(*args, **kwargs): pass\n")
    edit_config(
        source,
        vocab_size=199,
        auto_map=dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil.Evil"),
        attn_implementation="somebody/kernel",
        custom_generate="somebody/generate",
    )
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    before = fingerprint(source)
    done = processes.run(program("audited_conversion"), tmp_path, tmp_path / "dst", folder=source, elsewhere=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert not (tmp_path / "PLANTED").exists()
    assert fingerprint(source) == before
    assert not list((tmp_path / "dst").glob("evil*"))
    text = (tmp_path / "dst/config.json").read_text()
    assert "evil" not in text
    assert "somebody" not in text


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("could not create a memory object"), False),
        (RuntimeError("expected a tensor with contiguous memory format"), False),
        (OSError(2, "no such file in memory"), False),
    ],
)
def test_only_a_lack_of_memory_is_called_one(error, is_lack):
    expected = ConversionError if is_lack else type(error)
    with pytest.raises(expected) as caught, memory_errors():
        raise error
    assert ("out of memory; free some" in str(caught.value)) == is_lack
    assert caught.value is error or is_lack


def test_pytorch_says_so_in_the_words_that_are_looked_for():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
