"""The benchmarks: every row's code on tiny shapes, the tables, how memory is sampled, unequal models refused."""

import dataclasses
import importlib
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("psutil")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WAYS = ("command", "function", "whole process")
CONVERTED = {f"convert to {to}, {way}" for to in ("blockformer", "official") for way in WAYS}
WRITTEN = {
    ("decoder",): {"decode", "prefill"},
    ("small",): {"decode"},
    ("gpt2",): {"decode"},
    ("gemma", "experts"): {"decode", "prefill"},
    ("compiled",): {"decode, compiled", "greedy, compiled", "beam 4, compiled"},
    ("prompts",): {f"prompt{bits}{way}" for bits in ("", ", 4 bits") for way in ("", ", compiled")},
    ("encoder",): {f"encoder, {fill}% full" for fill in (41, 71, 100)},
    ("encoders",): {f"encoder, {fill}% full" for fill in (41, 71, 100)},
    ("encoder-decoder", "translator"): {f"encoder, {fill}% full" for fill in (41, 71, 100)} | {"greedy", "beam 4"},
    ("training",): {
        "training step", "training step, whole process", "training step, added to the resident",
    },
    ("load", "convert"): {"load", "load, first token"} | CONVERTED,
}  # fmt: skip


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of benchmarks/ as its neighbours do, and forgets them all afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [pytest.param(parts, marks=[] if parts == ("small",) else pytest.mark.exhaustive) for parts in WRITTEN],
    ids="-".join,
)
def test_every_row_on_tiny_shapes(parts, processes, tmp_path):
    script = "import runpy; sys.path[:0] = ['.']; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [BENCHMARKS / "run.py", "--tiny", "--only", *parts, "--output", tmp_path]
    done = processes.run(script, *command, folder=BENCHMARKS, elsewhere=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in tmp_path.iterdir()} == {"speed.md", "speed.json", "speed.png"}
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    works = {row["work"] for row in rows}
    if parts in (("decoder",), ("small",)):
        assert {f"{work}, 4 bits" for work in WRITTEN[parts]} < works
        works -= {f"{work}, 4 bits" for work in WRITTEN[parts]}
    # As loaded and, where this processor gains from it, prepared
    prepared = {work for work in works if ", prepared" in work}
    assert prepared <= {f"{work}, prepared{twice}" for work in WRITTEN[parts] for twice in ("", " twice")}
    assert works - prepared == WRITTEN[parts]
    for row in rows:
        sizes = [row[f"{side}_{what}"] for side in ("ours", "peer") for what in ("min", "median")]
        assert all(math.isfinite(size) and size > 0 for size in sizes)
        assert (row["limit"] > 0) == (row["work"] != "load")
        assert row["unit"] == ("bytes" if "whole process" in row["work"] or "added" in row["work"] else "seconds")
        assert row["ratio_min"] == row["peer_min"] / row["ours_min"]


PEERS = {
    "llama_cpp": {("llama.cpp", "bfloat16"), ("llama.cpp Q4_0", "int4"), ("llama.cpp Q4_0, head bfloat16", "int4")},
    "onnxruntime": {("ONNX Runtime", "float32")},
    "openvino": {("OpenVINO", "float32"), ("OpenVINO", "bfloat16")},
}


@pytest.mark.exhaustive
def test_each_runtime_that_is_installed_has_its_rows(tmp_path):
    command = [sys.executable, BENCHMARKS / "run.py", "--tiny", "--only", "peers", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    installed = [name for name in PEERS if importlib.util.find_spec(name)]
    assert all(name in done.stdout for name in PEERS.keys() - installed)
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert {(row["peer"], row["dtype"]) for row in rows} == {pair for name in installed for pair in PEERS[name]}
    assert all(row["ours_min"] > 0 and row["peer_min"] > 0 and row["limit"] > 0 for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"speed.md", "speed.json", "speed.png"}


def test_weights_rounded_for_llama_cpp_are_rounded_to_themselves_by_it(benchmark):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    weight = torch.randn(64, 96)
    weight[3, :32] = 0
    numbers, scales = benchmark("peers").round_weight(weight)
    rounded = ((numbers - 8) * scales[..., None].float()).flatten(1)
    blocks = gguf.quants.quantize(rounded.numpy(), gguf.GGMLQuantizationType.Q4_0)
    again = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0))
    assert torch.equal(again, rounded)
    assert 0 < (rounded - weight).norm() / weight.norm() < 0.15
    assert numbers.isfinite().all()


def test_each_unit_and_peer_has_a_table_of_its_own(benchmark):
    report, machine, workloads = (benchmark(name) for name in ("report", "machine", "workloads"))
    limits = machine.Machine("CPU", "AVX2", 2, "2", "5", 30, {"float32": 100})
    rows = [
        workloads.make_row("Tiny", "decode", torch.float32, 2048, 1, ([0.002, 0.001], [0.004, 0.002]), 0.0005),
        workloads.make_row("Tiny", "step", torch.float32, 0, 0, ([2e6], [3e6]), 1e6, unit="bytes"),
        workloads.make_row("Tiny", "convert", torch.float32, 0, 0, ([2.0], [1.0]), 0, peer="cp"),
    ]
    parts = report.markdown(limits, rows).split("\n\n")
    assert "ratio = transformers" in parts[1]
    assert parts[2].splitlines()[2:] == [
        "| Tiny | decode | float32 | 1 | 2,048 | 1.0 / 1.5 | 2.0 / 3.0 | 2.00 | 2.00 | 0.5 |"
    ]
    assert "MB" in parts[3]
    assert parts[4].splitlines()[2:] == [
        "| Tiny | step | float32 | - | - | 2.0 / 2.0 | 3.0 / 3.0 | 1.50 | 1.50 | 1.0 |"
    ]
    assert "ratio = cp /" in parts[5]
    assert parts[6].splitlines()[2:] == [
        "| Tiny | convert | float32 | - | - | 2,000.0 / 2,000.0 | 1,000.0 / 1,000.0 | 0.50 | 0.50 | - |"
    ]


def test_dtypes_in_which_large_models_would_take_hours_are_known(benchmark):
    measured = benchmark("machine").measure([torch.float32], size=64, read_bytes=2**20)
    slow = dataclasses.replace(measured, gemm_gflops={"bfloat16": 2.0, "float32": 68.0})
    assert not slow.multiplies(torch.bfloat16)
    assert slow.multiplies(torch.float32)


def test_the_peak_of_freed_memory_is_seen(benchmark):
    with benchmark("memory").Peak() as memory:
        for _ in range(5):
            held = torch.ones(1 << 24)
        del held
    assert 64e6 < memory.peak - memory.before < 200e6


def test_the_peak_of_a_command_is_its_own(benchmark):
    memory = benchmark("memory")
    held = torch.ones(1 << 26)  # this process must not count
    script = "import time; data = bytearray(80 << 20); data = None; time.sleep(0.2)"
    peak = memory.peak_of_command([sys.executable, "-c", script])
    assert 0 < peak < held.nbytes
    script = "import time; data = bytearray(b'x') * (80 << 20); time.sleep(0.2)"
    assert 80 << 20 < memory.peak_of_command([sys.executable, "-c", script]) < 120 << 20
    with pytest.raises(RuntimeError, match="no such thing"):
        memory.peak_of_command([sys.executable, "-c", "raise SystemExit('no such thing')"])


def test_unequal_losses_and_logits_end_the_run(benchmark):
    training, workloads = benchmark("training"), benchmark("workloads")
    training.check_same("Tiny", torch.float32, [11.0, 11.00001])
    for losses in ([11.0, 11.001], [math.nan, 11.0]):
        with pytest.raises(RuntimeError, match="nothing is timed"):
            training.check_same("Tiny", torch.float32, losses)
    logits = torch.randn(4, 8)
    workloads.check_same("Tiny", torch.float32, [logits, logits.clone()])
    with pytest.raises(RuntimeError, match="nothing is timed"):
        workloads.check_same("Tiny", torch.float32, [logits, logits + 0.01])
