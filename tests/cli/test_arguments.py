"""Each option of `blockformer convert` does something, or is refused by name, also next to each flag of a new shape."""

import re
import shutil

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from sizes import TINY
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockformer.cli import main
from blockformer.cli.commands import app

SIZES = {**TINY, "vocab_size": 61, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
SHAPES = {"topology": "encoder", "layers": "1", "kv_heads": "1", "experts": "2"}
VALUES = {
    "to": "official",
    "family": "qwen4",
    "config": "{tmp}/config.json",
    "into": "{tmp}/none",
    "dtype": "bfloat16",
    "dequantize": "bfloat16",
    "max_shard_size": "20KB",
    "verify": "full",
    "no_verify": None,
    "revision": "v1",
    "subfolder": "other",
    "variant": "fp16",
    "local_files_only": None,
    "force": None,
    "strict_finite": None,
    **SHAPES,
    "tokens": "no,yes",
    "template": "{tmp}/config.json",
    "pooling": "mean",
    "bidirectional": None,
    "prompt": "query=Find: ",
}
"""Option of `convert` -> a value that asks for something; None for a flag."""
ASKS_FOR_NOTHING = {"no_verify", "local_files_only"}
"""With a new shape, which compares nothing, and a folder, which needs no Hub."""


def options_of(command):
    """Parameter -> its option, as `--help` has them."""
    parameters = typer.main.get_command(app).commands[command].params
    return {each.name: max(each.opts, key=len) for each in parameters if each.param_type_name == "option"}


OPTIONS = options_of("convert")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An official model with a NaN, another one as a variant and in a subfolder."""
    folder = tmp_path_factory.mktemp("options") / "source"
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "other").mkdir()
    shutil.copy(folder / "config.json", folder / "other")
    for place in ("model.fp16.safetensors", "other/model.safetensors"):
        save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / place, {"format": "pt"})
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def run(source, tmp_path, capsys):
    """Converts into a folder with these options; what was said and written, or the error."""

    def run(**given):
        target = tmp_path / "target"
        arguments = ["convert", str(source), str(target)]
        for name, value in given.items():
            arguments += [OPTIONS[name]] if value is None else [OPTIONS[name], value.format(tmp=tmp_path)]
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        told = capsys.readouterr()
        if ended.value.code not in (0, None, 3):
            return " ".join(told.err.replace("│", " ").split())
        files = sorted(path.name for path in target.glob("model*"))
        weights = {name: load_file(target / name) for name in files if name.endswith(".safetensors")}
        tensors = [entry for each in weights.values() for entry in each.items()]
        sums = {name: (str(tensor.double().sum()), tensor.dtype) for name, tensor in tensors}
        shutil.rmtree(target)
        return files, sums, re.sub(r"[\d.]+ s\n", "", told.out), ended.value.code

    return run


def test_each_option_has_a_value_here():
    assert {*VALUES, "help"} == {*OPTIONS, "help"}


@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_each_option_does_something_or_is_refused_by_name(run, tmp_path, shape):
    (tmp_path / "config.json").write_text("{}")
    common = {} if shape is None else {shape: SHAPES[shape]}
    common |= {"no_verify": None} if shape is None else {}
    plain = run(**common)
    assert not isinstance(plain, str), plain
    for name, value in VALUES.items():
        if name in (shape, "no_verify", "force", "verify"):
            continue
        given = run(**common, **{name: value})
        assert given != plain or name in ASKS_FOR_NOTHING, name
        if isinstance(given, str) and name != "strict_finite":
            assert name in given or OPTIONS[name] in given or (name == "to" and "layout" in given), given
    assert "NaN or infinite values" in run(**common, strict_finite=None)
    common.pop("no_verify", None)
    assert "must be one of auto, quick, full, none, not 'banana'" in run(**common, verify="banana")
    assert run(**common, verify="quick") != run(**common, verify="none")
    (tmp_path / "target").mkdir()
    assert "already exists" in run(**common)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_new_shape_refuses_a_comparison(run, tmp_path, shape):
    flag = OPTIONS[shape]
    for how in ("full", "quick"):
        refused = run(**{shape: SHAPES[shape]}, verify=how)
        assert f"{flag}: a new shape cannot be combined with --verify {how}" in refused
    assert not (tmp_path / "target").exists()
    assert "NaN or infinite values (kept as they are)" in run(**{shape: SHAPES[shape]}, verify="none")[2]


def test_contradictions_are_refused(run, capsys):
    assert "--no-verify and --verify full contradict each other" in run(no_verify=None, verify="full")
    for arguments, named in [
        (["eval", "x", "y.txt", "--limit", "3"], "--limit is for --tasks"),
        (["inspect", "bert", "--variant", "fp16"], "--variant chooses weights"),
        (["inspect", "bert", "--compare", "gpt2"], "--compare and --force need --html"),
        (["inspect", "bert", "--html", "x", "--compare", "gpt2", "--beside", "t5"], "the former name of --compare"),
        (["inspect", "bert", "--revision", "v1"], "a preset, which has no revision"),
        (["lab", "x.yaml", "--report", "--dry-run"], "leave out --dry-run"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code in (1, 2)
        assert named in " ".join(capsys.readouterr().err.replace("│", " ").split())
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    shown = capsys.readouterr().out
    assert "--compare" in shown
    assert "--beside" not in shown
