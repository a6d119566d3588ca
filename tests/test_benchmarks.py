"""The benchmarks: every row's code on tiny shapes, the tables, how memory is sampled, unequal models refused."""

import dataclasses
import importlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pairs import assert_close
from rich.console import Console

from blockformer.engine import choices, runtime

pytest.importorskip("matplotlib")
pytest.importorskip("psutil")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WAYS = ("command", "function", "whole process")
ENCODED = {f"encoder, {fill}% full" for fill in (41, 71, 100)}
CONVERTED = {f"convert to {to}, {way}" for to in ("blockformer", "official") for way in WAYS}
WRITTEN = {
    ("decoder",): {"decode", "prefill"},
    ("small",): {"decode"},
    ("gpt2",): {"decode"},
    ("gemma", "experts", "hybrid"): {"decode", "decode, compiled", "prefill"},
    ("compiled",): {f"{work}, compiled" for work in ("decode", "greedy", "beam 4")},
    ("both-compiled",): {f"{work}, compiled" for work in ("decode", "greedy", "beam 4")},
    ("prompts",): {"prompt", "prompt, 4 bits"},
    ("encoder",): ENCODED,
    ("encoders",): ENCODED,
    ("encoder-decoder", "translator"): ENCODED | {"greedy", "beam 4"},
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
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}  # tests/sizes.py
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


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
    # As loaded, and most of them prepared
    prepared = {work for work in works if ", prepared" in work}
    assert prepared <= {f"{work}, prepared" for work in WRITTEN[parts]}
    assert works - prepared == WRITTEN[parts]
    for row in rows:
        sizes = [row[f"{side}_{what}"] for side in ("ours", "peer") for what in ("min", "median")]
        assert all(math.isfinite(size) and size > 0 for size in sizes)
        assert (row["limit"] > 0) == (row["work"] != "load")
        assert row["unit"] == ("bytes" if "whole process" in row["work"] or "added" in row["work"] else "seconds")
        assert row["ratio_min"] == row["peer_min"] / row["ours_min"]


def test_a_way_that_is_off_is_not_taken(benchmark, monkeypatch):
    ways, sizes = benchmark("ways"), benchmark("sizes")
    works = {"prompt": (ways._reading(torch.ones(1, 8, dtype=torch.long)), 8, 1)}
    faster = {(way, torch.float32): True for way in (choices.IN_PARTS, choices.ONEDNN)}
    faster |= {(choices.WIDENED, torch.bfloat16): True, (choices.PACKED, torch.float32): False}
    monkeypatch.setattr(choices, "FASTER_HERE", faster)
    with ways.without_way(choices.ONEDNN):
        assert not choices.is_faster(choices.ONEDNN, torch.float32)
        assert choices.is_faster(choices.IN_PARTS, torch.float32)
    assert choices.FASTER_HERE is faster
    model = benchmark("workloads").make_pair(sizes.TINY.prefill, torch.float32)[0]
    rows = list(ways._measured(model, "Tiny", works, sizes.TINY, Console(quiet=True)))
    assert {row.peer for row in rows} == {f"without {way}" for way in (choices.IN_PARTS, choices.ONEDNN)}
    assert all(row.ours_min > 0 and row.peer_min > 0 for row in rows)


PEERS = {
    "ctranslate2": {("CTranslate2", "float32"), ("CTranslate2 int8", "float32")},
    "llama_cpp": {("llama.cpp", "bfloat16"), ("llama.cpp Q4_0", "int4"), ("llama.cpp Q4_0, head bfloat16", "int4")},
    "onnxruntime": {("ONNX Runtime", "float32")},
    "openvino": {("OpenVINO", "float32"), ("OpenVINO", "bfloat16")},
    "onnxruntime_genai": {("ONNX Runtime GenAI", "float32")},
}


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_each_runtime_that_is_installed_has_its_rows(tmp_path, pytestconfig):
    command = [sys.executable, BENCHMARKS / "run.py", "--tiny", "--only", "peers", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    installed = [name for name in PEERS if importlib.util.find_spec(name)]
    if pytestconfig.getoption("--environment") == "peers":
        assert installed == list(PEERS)
    assert all(name in done.stdout for name in PEERS.keys() - installed)
    if not installed:
        assert done.returncode == 1
        assert "nothing was measured: the packages named above are missing" in done.stderr
        assert not list(tmp_path.iterdir())
        return
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert {(row["peer"], row["dtype"]) for row in rows} == {pair for name in installed for pair in PEERS[name]}
    assert all(row["ours_min"] > 0 and row["peer_min"] > 0 and row["limit"] > 0 for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"speed.md", "speed.json", "speed.png"}


def test_an_export_is_timed_as_its_model_is(benchmark):
    """Its row has the same work: an export has no weights to count."""
    seq2seq, exported = benchmark("seq2seq"), benchmark("peers").Exported
    ours, official = seq2seq.make_bert(layers=1)
    states = exported(lambda inputs: official(**{k: torch.from_numpy(v) for k, v in inputs.items()})[0].numpy())
    rows = [seq2seq.encode((ours, peer), "BERT", 1.0, 1, {"float32": 1.0}) for peer in (official, states)]
    assert rows[0].limit == rows[1].limit > 0


EIGHT_BITS = {
    "torchao": {"Blockformer, torchao int8", "transformers, torchao int8, torch.compile"}
    | {"transformers, torchao int8 weights, torch.compile"},
    "onnxruntime": {"ONNX Runtime, float32", "ONNX Runtime, int8"},
    "nncf": {f"OpenVINO, {way}" for way in ("float32", "bfloat16", "int8 weights by NNCF", "int8 by NNCF")},
}
NO_TOOL = {"transformers, float32", "transformers, quantize_dynamic", "Blockformer, quantize_dynamic"} | {
    f"Blockformer, {way}" for way in ("float32, prepared", "bfloat16, prepared")
}


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_an_encoder_in_8_bits_is_measured_by_every_tool(tmp_path):
    command = [sys.executable, BENCHMARKS / "run.py", "--tiny", "--only", "int8", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    installed = [name for name in EIGHT_BITS if importlib.util.find_spec(name)]
    assert all(name in done.stdout for name in EIGHT_BITS.keys() - installed)
    ways = json.loads((tmp_path / "int8.json").read_text())["ways"]
    assert ways[0]["name"] == "transformers, float32"
    assert {way["name"] for way in ways} == NO_TOOL.union(*(EIGHT_BITS[name] for name in installed))
    for way in ways:
        assert way["seconds"].keys() == {"mixed", "like", "one"}
        assert all(0 < best <= median for best, median in way["seconds"].values())
        assert 0.8 < way["worst_cosine"] <= way["cosine"] < 1 + 1e-5
        assert 0 < way["neighbours"] <= 1
        assert way["megabytes"] > 10
    assert {path.name for path in tmp_path.iterdir()} == {"int8.md", "int8.json"}
    assert all(f"| {way['name']} |" in (tmp_path / "int8.md").read_text() for way in ways)


def test_neighbours_are_shared_or_not(benchmark):
    same_neighbours = benchmark("int8").same_neighbours
    angles = torch.tensor([0.0, 0.1, 0.3, 2.0, 2.1, 2.3])
    vectors = torch.stack((angles.cos(), angles.sin()), dim=-1)
    assert same_neighbours(vectors, vectors, 2) == 1
    assert same_neighbours(vectors[[0, 3, 1, 4, 2, 5]], vectors, 2) == pytest.approx(1 / 3)
    assert same_neighbours(vectors, vectors, 10) == 1  # all others, where there are fewer


def test_layers_in_8_bits_are_rounded_by_token_and_channel(benchmark):
    own = benchmark("own_int8")
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    states = torch.randn(3, 5, 64) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    assert own.rounded(states)[0].abs().amax(-1).eq(127).all()
    with torch.no_grad():
        exact = own.Rounded(layer, own.by_none)(states)
        assert_close(own.Rounded(layer, own.by_int_mm)(states), exact)
        error = (exact - layer(states)).abs().amax(-1) / states.abs().amax(-1)
    assert 1e-4 < error.max() < 2e-2
    parts = {name: torch.nn.Linear(4, 4) for name in ("q_proj", "up_proj")}
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict(parts)]), "q_proj": layer})
    low = own.in_8_bits(model, ("q_proj",), own.by_none)
    assert [name for name, each in low.named_modules() if isinstance(each, own.Rounded)] == ["layers.0.q_proj"]
    assert not any(isinstance(each, own.Rounded) for each in model.modules())


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


def test_a_run_is_written_as_the_pages_read_it(benchmark, monkeypatch, tmp_path):
    report, machine, workloads = (benchmark(name) for name in ("report", "machine", "workloads"))
    row = workloads.make_row("Tiny", "decode", torch.float32, 16, 1, ([0.002], [0.004]), 0.0)
    monkeypatch.setattr(sys, "argv", ["/some/where/benchmarks/run.py", "--only", "small"])
    report.write(tmp_path, machine.Machine(**machine.named(), read_gbs=30, gemm_gflops={"float32": 100}), [row])
    run = json.loads((tmp_path / "speed.json").read_text())
    assert run["command"] == "python benchmarks/run.py --only small"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])
    assert run["machine"].keys() > machine.named().keys() == {"processor", "instructions", "threads", *VERSIONS}
    assert (run["rows"][0]["work"], run["rows"][0]["ratio_median"]) == ("decode", 2)


VERSIONS = ("torch", "transformers")


@pytest.mark.parametrize("name", ["thresholds", "drafts"])
def test_what_a_program_prints_it_also_writes(name, benchmark, monkeypatch, tmp_path, capsys):
    program, threads = benchmark(name), torch.get_num_threads()
    if name == "thresholds":
        monkeypatch.setattr(program, "ratios", lambda: iter([("a number", 8, [0.5, None])]))
    else:
        monkeypatch.setattr(program, "gather", lambda **_: None)
        monkeypatch.setattr(program, "trained", lambda *_: (None, torch.zeros(1024, dtype=torch.long)))
        monkeypatch.setattr(program, "measured", lambda *_: {0: (64.0, 0.5), 1: (40.0, 0.4)})
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--output", str(tmp_path / "run.json")])
    try:
        program.main()
    finally:
        torch.set_num_threads(threads)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["command"].startswith(f"python benchmarks/{name}.py --output")
    assert run["machine"]["processor"] in capsys.readouterr().out
    rows = {"thresholds": [{"name": "a number", "number": 8, "ratios": [0.5, None]}]}
    rows["drafts"] = [{"drafts": 0, "forwards": 64, "seconds": 0.5}, {"drafts": 1, "forwards": 40, "seconds": 0.4}]
    assert run["rows"] == rows[name]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["bert"],
        pytest.param(
            ["qwen3", "gpt2", "gemma2", "gpt_oss", "mixtral", "t5", "marian", "uses"], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_what_a_gpu_is_asked_is_right_on_a_cpu(names, processes, tmp_path):
    """In a process of its own: the script finds the project by itself."""
    script = "import runpy; sys.path[:0] = ['.']; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [BENCHMARKS / "gpu.py", "--only", *names, "--output", tmp_path]
    done = processes.run(script, *command, folder=BENCHMARKS, elsewhere=False, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["family"] for row in report["checks"]} == set(names)
    assert {row["dtype"] for row in report["checks"]} == {"float32", "bfloat16", "float16"}
    assert all(row["is_right"] for row in report["checks"])
    assert not report["times"]
    assert "**wrong**" not in (tmp_path / "gpu.md").read_text()


def test_a_wrong_answer_of_a_gpu_is_seen(benchmark, monkeypatch, tmp_path, capsys):
    gpu, gpu_checks = benchmark("gpu"), benchmark("gpu_checks")
    convert = gpu_checks.converted

    def wrong(peer):
        model = convert(peer)
        with torch.no_grad():
            model.get_output_embeddings().bias.add_(0.01)
        return model

    def child(command, **_):
        *_, name, file = command
        gpu.check_one(name, Path(file), "cpu")
        return SimpleNamespace(returncode=0, stderr="")

    for limit in ("_LEAST_WORK", "_LEAST_WORK_OF_FLOAT32", "_LEAST_SHARE"):  # which the checks change
        monkeypatch.setattr(runtime, limit, 0)
    monkeypatch.setattr(gpu_checks, "converted", wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu.subprocess, "run", child)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "bert", "--output", str(tmp_path)])
    assert gpu.main() == 1
    assert "WRONG" in capsys.readouterr().out
    assert "**wrong**" in (tmp_path / "gpu.md").read_text()


def test_a_family_whose_process_dies_is_wrong(benchmark, monkeypatch, tmp_path):
    gpu = benchmark("gpu")

    def child(command, **_):
        Path(command[-1]).write_text(json.dumps(dataclasses.asdict(ROW)) + "\n")
        return SimpleNamespace(returncode=-6, stderr="CUDA error: an illegal memory access")

    ROW = benchmark("gpu_checks").Check("bert", "as loaded", "float32", 0.0, 0.0, True)
    monkeypatch.setattr(gpu.subprocess, "run", child)
    first, second = gpu.checked_apart(["bert"])
    assert first.is_right
    assert (second.is_right, second.note) == (False, "CUDA error: an illegal memory access")


def test_a_way_that_raises_is_a_wrong_answer_with_its_error(benchmark):
    gpu, gpu_checks, gpu_times = (benchmark(name) for name in ("gpu", "gpu_checks", "gpu_times"))

    def broken():
        raise RuntimeError("no such kernel")

    check = gpu_checks.check("bert", "prepared", "bfloat16", 1e-3, broken)
    assert not check.is_right
    assert check.note == "RuntimeError: no such kernel"
    table = gpu.markdown(
        {"device": "D", "torch": "2", "transformers": "5"}, [check],
        [gpu_times.Time("w", "bfloat16", "ms", (1.0, 2.0), (2.0, 4.0))], ["training, out of time"],
    )  # fmt: skip
    assert "**wrong** RuntimeError: no such kernel" in table
    assert "| w | bfloat16 | ms | 1.00 / 2.00 | 2.00 / 4.00 | 2.00 |" in table
    assert "Not measured: training, out of time." in table
