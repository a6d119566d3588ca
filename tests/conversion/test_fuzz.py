"""Hostile and damaged checkpoints in large numbers: only our errors or good results, within limits, nothing left.

The cases are in `fuzzing.py`. A failure names its case; `python tests/conversion/fuzzing.py EMPTY_FOLDER CASE 1` runs
that one again.
"""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_files import make_sharded, write_index
from fork_server import ForkServer

from blockformer.conversion import ConversionError, convert
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import CheckpointError
from blockformer.files.json_files import strict_json

from . import fuzzing
from .oracles import edit_config, official_folder

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="limits a process, and watches it by /proc")
PATIENCE = 90
"""Seconds without a next case after which the process counts as hanging (it limits its processor time by itself)."""


def run_cases(folder: Path, first: int, count: int) -> dict[str, Any]:
    """Run cases in a process of their own, and give what it found."""
    command = [sys.executable, fuzzing.__file__, str(folder), str(first), str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder.parent / "out", "w+b") as out, open(folder.parent / "errors", "w+b") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
        last, since = "before the first case", time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            current = (folder / "progress").read_text() if (folder / "progress").exists() else last
            if current != last:
                last, since = current, time.monotonic()
            if time.monotonic() - since > PATIENCE:
                process.kill()
                process.wait()
                pytest.fail(f"case {last.strip()} hangs")
        out.seek(0)
        errors.seek(0)
        lines = out.read().splitlines()
        assert process.returncode == 0, f"case {last.strip()}: status {process.returncode}\n{errors.read().decode()}"
    return checked(lines[-1])


def checked(line: str | bytes) -> dict[str, Any]:
    """What the cases found, and that they took no more memory than they may."""
    result = json.loads(line)
    assert result["grown"] < fuzzing.MEMORY
    return result


@needs_linux
def test_some_cases(tmp_path: Path, processes: ForkServer) -> None:
    """Those of numbers below 0 do what is forbidden, to show that it would be seen."""
    (tmp_path / "base").mkdir()
    code = "sys.path.append(sys.argv[1]); import fuzzing; fuzzing.main(fuzzing.Path('base').resolve(), -7, 33)"
    here = Path(fuzzing.__file__).parent
    failures = checked(processes.said(code, here, folder=tmp_path, elsewhere=False))["failures"]
    wanted = ["KeyError", "TooLong", "reads outside", "writes", "out of memory", "MemoryError", "os.system"]
    assert [case["case"] for case in failures] == list(range(-7, 0)), told(failures)
    assert all(word in case["problem"] for word, case in zip(wanted, failures, strict=True)), told(failures)


def told(failures: list[dict[str, Any]]) -> str:
    return "\n".join(f"case {case['case']}: {case['problem']}" for case in failures)


@needs_linux
@pytest.mark.exhaustive
def test_fifty_thousand_cases(tmp_path: Path, first_seed: int) -> None:
    (tmp_path / "base").mkdir()
    result = run_cases(tmp_path / "base", first_seed, 50_000)
    assert not result["failures"], told(result["failures"])
    seconds = f"{result['seconds']:.0f} s, {result['processor']:.0f} s of one core"
    print(f"\n{seconds}; longest case {result['longest']}; memory grown by {result['grown'] >> 20} MiB")


# --- cases that once found a bug ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small official checkpoint of several families."""
    folders = {}
    for name in ("qwen3", "bert", "gpt2", "t5", "bart"):
        family = fuzzing.FAMILIES[name]
        folders[name] = tmp_path_factory.mktemp("official") / name
        config = family.settings.official_class(**fuzzing.OFFICIAL[name])
        getattr(transformers, family.heads[0].official)(config).save_pretrained(folders[name])
    return folders


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"architectures": [[]]}, "list of names") for name in ("qwen3", "bert", "gpt2", "t5", "bart")),
    *((name, {"architectures": 1.5}, "list of names") for name in ("qwen3", "gpt2", "t5")),
    ("qwen3", {"dtype": [5e-324, 0]}, "name of a dtype"),
    ("qwen3", {"torch_dtype": {"a": 1}}, "name of a dtype"),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10**30}}, "more than 64 bits"),
    ("bert", {"num_hidden_layers": 100_000}, "num_hidden_layers is 100000; the tensors can hold"),
    ("bert", {"num_labels": 100_000}, "num_labels is 100000; the tensors can hold"),
    ("gpt2", {"n_layer": 100_000}, "the tensors can hold"),
    ("t5", {"num_decoder_layers": 100_000}, "the tensors can hold"),
    ("bart", {"encoder_layers": 100_000}, "the tensors can hold"),
    ("qwen3", {"name": "\ud800"}, "surrogate pair"),
]


@pytest.mark.parametrize(("family", "changes", "message"), CONFIGS)
def test_a_config_that_ended_in_another_error_or_in_hours(
    official: dict[str, Path], tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((official[family] / "config.json").read_bytes())
    os.link(official[family] / "model.safetensors", source / "model.safetensors")
    edit_config(source, **changes)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "target", verify=False)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("text", [b"1e999", b"[-1E400]", b"[" * 900 + b"]" * 900, b'"\\ud800"', b'{"\\uDFFF": 1}'])
def test_json_that_no_one_can_work_with(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"too large a number|nested too deeply|surrogate pair"):
        strict_json(text)
    assert strict_json(b'["\\ud83d\\ude00", 1.5e300, [[[[[]]]]]]') == ["\U0001f600", 1.5e300, [[[[[]]]]]]


def test_settings_that_only_the_official_model_refuses(tmp_path: Path, official: dict[str, Path]) -> None:
    convert(official["bart"], tmp_path / "ours", verify=False)
    memory = json.loads((tmp_path / "ours/conversion.json").read_text())
    memory["config"]["d_model"] = 17
    (tmp_path / "ours/conversion.json").write_text(json.dumps(memory))
    edit_config(tmp_path / "ours", hidden_size=17)
    with pytest.raises(ConversionError):
        convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify=False)


def test_an_index_with_a_name_longer_than_a_file_can_have(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    write_index(tmp_path, {"a.weight": "x" * 5000})
    with pytest.raises(CheckpointError, match="weight_map must name files in the same folder"):
        Checkpoint(tmp_path)


def test_a_zip_whose_directory_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("é" * 4, b"x")
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xff"))
    with pytest.raises(CheckpointError, match="damaged zip file"):
        Checkpoint(tmp_path)


def test_a_refused_pickle_gives_no_advice_to_load_it_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="nothing of it was run") as caught:
        Checkpoint(tmp_path)
    assert str(caught.value).isprintable()
    assert "can still be loaded" not in str(caught.value)
    assert "print" in str(caught.value)


def test_what_a_message_quotes_is_fit_for_a_terminal(tmp_path: Path) -> None:
    official_folder(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ours", verify=False)
    edit_config(tmp_path / "ours", **{"\x1b[2J\r": 1})
    with pytest.raises(ConversionError, match=r"x1b") as caught:
        convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify=False)
    assert str(caught.value).replace("\n", "").isprintable()
