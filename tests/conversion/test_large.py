"""A checkpoint of 8 GB (the shapes of Qwen3-4B, made on the spot): memory, time, a limit of address space, offload.

Alone on a quiet machine, with what it measures: `pytest -m exhaustive -s tests/conversion/test_large.py`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import PROGRAMS
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.writer import ShardWriter

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(3000),
]
QWEN3_4B = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": int(os.environ.get("BLOCKFORMER_LARGE_LAYERS", "36")),
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
LARGEST = 151_936 * 2560 * 2
ROUNDS = 2


def run(name: str, *arguments: Any) -> dict[str, Any]:
    command = [
        sys.executable,
        PROGRAMS / "memory_of_conversion.py",
        name,
        json.dumps([str(x) if isinstance(x, Path) else x for x in arguments]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(
        f"\n{name}:", {key: f"{value / 1e6:.0f} MB" if type(value) is int else value for key, value in result.items()}
    )
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with `small` and `source`, official checkpoints; removed with all that is made beside them."""
    base = tmp_path_factory.mktemp("large")
    if shutil.disk_usage(base).free < 30e9:
        pytest.skip("needs 30 GB of disk")
    config = Qwen3Config(**QWEN3_4B, dtype="bfloat16", architectures=["Qwen3ForCausalLM"])
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Qwen3ForCausalLM(config).named_parameters()}
    source = base / "source"
    source.mkdir()
    config.save_pretrained(source)
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(1 << 20, generator=generator) * 0.02).bfloat16()
    with ShardWriter(source, [(name, torch.bfloat16, shape) for name, shape in shapes.items()], "3GB") as writer:
        for number, (name, shape) in enumerate(shapes.items()):
            count = torch.Size(shape).numel()
            parts = (noise.roll(number + at)[: count - at] for at in range(0, count, len(noise)))
            writer.write_parts(name, parts)
    small = {**QWEN3_4B, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    Qwen3ForCausalLM(Qwen3Config(**small)).save_pretrained(base / "small")
    yield base
    shutil.rmtree(base)


@pytest.fixture(autouse=True)
def synced(real_fsync, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is timed until it is on the disk."""
    monkeypatch.setattr(os, "fsync", real_fsync)


def copied(source: Path, target: Path) -> float:
    """Seconds of `cp -r` with every file and the folder synced."""
    start = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in [*target.iterdir(), target]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


def test_both_ways_in_little_memory(folders: Path) -> None:
    ours, back = folders / "ours", folders / "back"
    for source, target, to_official in ((folders / "source", ours, False), (ours, back, True)):
        seconds: dict[str, list[float]] = {"convert": [], "copy": []}
        for _ in range(ROUNDS):
            seconds["copy"].append(copied(source, folders / "copy"))
            shutil.rmtree(target, ignore_errors=True)
            result = run("converting", folders / "small", source, target, to_official, 4 << 30)
            assert result["outcome"] == "converted"
            assert result["anonymous"] + result["file"] < LARGEST + (300 << 20)
            assert result["file"] < 100 << 20  # nothing is mapped, so no pages of the source pile up
            seconds["convert"].append(result["seconds"])
            shutil.rmtree(f"{target}-warm")
        ratio = min(seconds["convert"]) / min(seconds["copy"])
        print(f"{'to official' if to_official else 'to ours'}: {ratio:.2f} times a copy, seconds {seconds}")
    with Checkpoint(folders / "source") as first, Checkpoint(back) as second:
        assert first.tensors.keys() == second.tensors.keys()
        for name in first.tensors:
            parts = zip(first.parts(name), second.parts(name), strict=True)
            assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in parts), name


def test_hardly_any_address_space_is_enough_or_a_clean_failure(folders: Path) -> None:
    result = run("converting", folders / "small", folders / "source", folders / "tight", False, 8 << 20)
    shutil.rmtree(folders / "tight-warm")
    if result["outcome"] == "converted":
        shutil.rmtree(folders / "tight")
    else:
        assert "memory" in result["outcome"]
    assert not [path.name for path in folders.iterdir() if "tight" in path.name]


def test_offloaded_to_disk_a_forward_pass_takes_less_than_3_gb(folders: Path) -> None:
    if not (folders / "ours").exists():
        run("converting", folders / "small", folders / "source", folders / "ours", False, 4 << 30)
    result = run("offloaded", folders / "ours", folders / "offload")
    assert "disk" in result["places"]
    assert result["finite"]
    assert result["total"] < 3e9
