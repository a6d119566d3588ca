"""Runs in a folder: the same rows however often it is interrupted and by however many processes it is done."""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blockformer.cli import main
from blockformer.data.corpus import model_score
from blockformer.lab import one_run, runs
from blockformer.lab.experiment import LabError
from blockformer.lab.experiment_file import read_experiment
from blockformer.lab.text import Text

from .experiments import write_experiment

# What the clock and the machine have a say in.
MEASURED = ("seconds", "peak_memory")

LAB = """
import os, signal
from blockformer.cli import main
from blockformer.lab import one_run
step, name, deadly = one_run._Watch.on_step_end, sys.argv[2], int(sys.argv[3])
def on_step_end(self, args, state, control, **kwargs):
    step(self, args, state, control, **kwargs)
    if args.output_dir.endswith(name) and state.global_step == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
one_run._Watch.on_step_end = on_step_end
main(["lab", sys.argv[1], "--output", sys.argv[4]])
"""


def lab(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["lab", *map(str, arguments)])
    return ended.value.code or 0


def rows(folder):
    """The rows by name, without what was measured."""
    found = {row["name"]: row for row in runs.read_rows(folder)}
    return {name: {key: value for key, value in row.items() if key not in MEASURED} for name, row in found.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An experiment's file and the folder of its runs, done at one go."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_experiment(folder)
    assert lab(path, "--output", folder / "out") == 0
    return path, folder / "out"


def test_a_row_says_what_was_trained_and_what_came_of_it(whole):
    path, folder = whole
    found = runs.read_rows(folder)
    assert [row["name"] for row in found] == [
        f"{name}-seed{seed}" for name in ("base", "qk_norm=false") for seed in (0, 1)
    ]
    experiment = read_experiment(path)
    text = Text(experiment.data)
    held_out = text.tokens(300).held_out
    for row in found:
        assert (row["steps"], row["tokens"]) == (10, 640)
        assert row["flops"] == 640 * row["flops_per_token"]
        assert row["config"]["qk_norm"] is (row["variant"] == "base")
        assert row["seconds"] > 0
        assert row["peak_memory"] is None or row["peak_memory"] > 50e6
        assert [tokens for tokens, _ in row["curve"]["held_out"]] == [128, 256, 384, 512, 640]
        assert len(row["curve"]["train"]) == 5
        assert row["held_out_bytes"] == sum(file.num_bytes for file in text.corpus.held_out)
        # bits of all tokens but the first, over all bytes
        bits = row["loss"] * (len(held_out) - 1) / math.log(2)
        assert row["bits_per_byte"] == pytest.approx(bits / row["held_out_bytes"], rel=1e-12)
    assert len({row["bits_per_byte"] for row in found}) == 4
    assert (folder / "rows.jsonl").read_text().splitlines() == [json.dumps(row) for row in found]  # in the file's order
    assert not [path for path in (folder / "runs").iterdir() if path.is_dir()]


def test_all_runs_of_a_seed_read_the_same_rows_in_the_same_order(whole, tmp_path, monkeypatch):
    experiment = read_experiment(whole[0])
    text, read = Text(experiment.data), {}
    original = one_run.Blocks.__getitem__

    def noted(self, index):
        read[name].append(index)
        return original(self, index)

    monkeypatch.setattr(one_run.Blocks, "__getitem__", noted)
    for run in experiment.runs():
        name = run.name
        read[name] = []
        one_run.train(experiment, run, text, tmp_path / name, lambda news, share: None)
    assert read["base-seed0"] == read["qk_norm=false-seed0"]
    assert read["base-seed1"] == read["qk_norm=false-seed1"]
    assert read["base-seed0"] != read["base-seed1"]


def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_been(whole, tmp_path, processes):
    path, unbroken = whole
    folder = tmp_path / "out"
    # Of the third run, after its third checkpoint and a step on.
    killed = processes.run(LAB, path, "base-seed1", 7, folder, folder=tmp_path, elsewhere=False, OMP_NUM_THREADS="1")
    assert killed.returncode == -9, killed.stderr
    finished = {row: row.read_bytes() for row in (folder / "runs").glob("*.json")}
    assert {row.stem for row in finished} == {"base-seed0", "qk_norm=false-seed0"}
    assert (folder / "runs" / "base-seed1" / "checkpoint-6").is_dir()
    assert lab(path, "--output", folder) == 0
    assert all(row.read_bytes() == before for row, before in finished.items())
    assert rows(folder) == rows(unbroken)


def test_shards_do_each_run_once(whole, tmp_path, monkeypatch):
    path, unbroken = whole
    folder, done = tmp_path / "out", []
    train = runs.train
    monkeypatch.setattr(runs, "train", lambda *given: done.append(given[1].name) or train(*given))
    for part, expected in (
        (2, ["qk_norm=false-seed0"]),
        (3, ["base-seed1"]),
        (1, ["base-seed0", "qk_norm=false-seed1"]),
    ):
        done.clear()
        assert lab(path, "--output", folder, "--shard", f"{part}/3") == 0
        assert done == expected
    assert rows(folder) == rows(unbroken)
    done.clear()
    assert lab(path, "--output", folder) == 0
    assert done == []


def test_a_run_that_another_process_is_at_is_left_to_it(whole, tmp_path, capsys):
    path, unbroken = whole
    folder = tmp_path / "out"
    shutil.copytree(unbroken, folder)
    (folder / "runs" / "base-seed1.json").unlink()
    (folder / "runs" / "base-seed1").mkdir()
    with open(folder / "runs" / "base-seed1" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert lab(path, "--output", folder) == 0
        assert "other processes are working on 1 of these runs: base-seed1" in capsys.readouterr().err
        assert len(rows(folder)) == 3
    assert lab(path, "--output", folder) == 0  # the lock went with its process
    assert rows(folder) == rows(unbroken)


def test_where_nothing_can_be_locked_shards_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "fcntl", None)
    with pytest.raises(LabError, match="give each process its own --shard"):
        with runs._alone(tmp_path / "run", is_sharded=False):
            pass
    with runs._alone(tmp_path / "run", is_sharded=True) as mine:
        assert mine


def test_more_seeds_and_configs_join_what_is_there_and_another_experiment_does_not(whole, tmp_path, capsys):
    path, unbroken = whole
    folder = tmp_path / "out"
    shutil.copytree(unbroken, folder)
    shutil.copytree(path.parent / "text", tmp_path / "text")
    more = write_experiment(tmp_path, axes={"qk_norm": [False], "norm_type": ["layer_norm"]}, seeds=[0])
    assert lab(more, "--output", folder) == 0
    assert len(rows(folder)) == 5
    for change, told in (
        ({"budget": {"tokens": 700}}, "budget is ['tokens', 640] there and ['tokens', 700] here"),
        ({"data": {"max_bytes": 25_000}}, "text is"),
        (
            {"axes": {}, "configs": {"qk_norm=false": {"qk_norm": "projection"}}},
            "belongs to another config of this name",
        ),
    ):
        before = sorted(folder.rglob("*"))
        assert lab(write_experiment(tmp_path, **change), "--output", folder) == 1
        assert told in capsys.readouterr().err
        assert sorted(folder.rglob("*")) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    assert lab(path, "--output", other) == 1
    assert "is not an experiment's folder" in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]


def test_a_folder_may_be_opened_while_another_process_opens_it(tmp_path, monkeypatch):
    """The second comes when the first has written the file beside its place, and not renamed it yet."""
    experiment, rename = read_experiment(write_experiment(tmp_path)), os.replace
    text, seen = Text(experiment.data), []

    def second_comes(source, target):
        monkeypatch.setattr(os, "replace", rename)
        seen.extend(path.name for path in (tmp_path / "out").iterdir())
        runs.open_folder(tmp_path / "out", experiment, text)
        rename(source, target)

    monkeypatch.setattr(os, "replace", second_comes)
    runs.open_folder(tmp_path / "out", experiment, text)
    assert len(seen) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["experiment.json", "runs"]


def test_a_run_that_diverges_is_a_row_and_the_others_go_on(tmp_path, capsys):
    path = write_experiment(tmp_path, training={"learning_rate": 1e30, "max_grad_norm": 0}, seeds=[0])
    assert lab(path, "--output", tmp_path / "out") == 0
    found = runs.read_rows(tmp_path / "out")
    assert [row["bits_per_byte"] for row in found] == [None, None]
    assert all("NaN or infinite" in row["diverged"] or "not finite" in row["diverged"] for row in found)
    assert "diverged" in capsys.readouterr().out


def test_minutes_bound_a_run_before_and_after_an_interruption(tmp_path, monkeypatch):
    """A clock of our own, on which each look takes a second."""
    now = iter(range(1_000_000))
    for module in ("blockformer.lab.one_run", "blockformer.training.budget"):
        monkeypatch.setattr(f"{module}.time.perf_counter", lambda: float(next(now)))
    experiment = read_experiment(write_experiment(tmp_path, budget={"minutes": 2}, axes=None, seeds=[0]))
    run, text, kept = experiment.runs()[0], Text(experiment.data), []

    def tell(news, share):
        kept.append((news, share))
        if share > 0.5 and not any(news for news, _ in kept) and (tmp_path / "run").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one_run.train(experiment, run, text, tmp_path / "run", tell)
    row = one_run.train(experiment, run, text, tmp_path / "run", tell)
    resumed = [share for news, share in kept if news == "resumed"]
    assert 0.2 <= resumed[0] <= 0.6
    assert 120 <= row["seconds"] < 140
    assert row["steps"] < 120


def test_scores_take_every_byte(whole):
    """Bits per byte by hand: one token after another, no windows."""
    experiment = read_experiment(whole[0])
    text, run = Text(experiment.data), experiment.runs()[0]
    held_out = text.tokens(300).held_out[:40]
    torch.manual_seed(0)
    model = one_run.BlockformerDecoderForCausalLM(run.config).eval()
    nats = 0.0
    with torch.no_grad():
        for start in range(0, 39, 16):
            window = held_out[start : start + 17]
            logits = model(window[None, :-1]).logits[0].double().log_softmax(-1)
            nats -= sum(logits[place, token].item() for place, token in enumerate(window[1:]))
    score = model_score(model, held_out, 77, 16)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / 77, rel=1e-6)


@pytest.mark.exhaustive
def test_a_run_may_have_several_processes_of_which_one_writes(tmp_path):
    path = write_experiment(tmp_path, seeds=[0])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "blockformer", "lab", str(path), "--output", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| base |") == 1
    found = runs.read_rows(tmp_path / "out")
    # twice the rows in a step, the same tokens
    assert [(row["name"], row["processes"], row["steps"], row["tokens"]) for row in found] == [
        ("base-seed0", 2, 5, 640),
        ("qk_norm=false-seed0", 2, 5, 640),
    ]
    assert not [path for path in (tmp_path / "out" / "runs").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["nowhere.yaml"], 1, "nowhere.yaml: no such file"),
        (["x.yaml", "--shard", "4/3"], 2, "--shard must be like 3/8"),
        (["x.yaml", "--shard", "half"], 2, "--shard must be like 3/8"),
        (["x.yaml", "--widths", "64"], 2, "--widths must list two or more"),
    ],
)
def test_wrong_arguments_are_told(arguments, code, told, capsys):
    assert lab(*arguments) == code
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_dry_run_makes_nothing(tmp_path, capsys):
    path = write_experiment(tmp_path)
    assert lab(path, "--output", tmp_path / "out", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "qk_norm=false" in said
    assert "4 runs (2 seeds) with equal parameters, each of 640 tokens" in said
    assert not (tmp_path / "out").exists()
    assert lab(path, "--output", tmp_path / "out", "--report") == 1
    assert not Path(tmp_path / "out").exists()
