"""Training resumes from a whole checkpoint only, with the weights of its config."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from fork_server import program
from pairs import config, token_ids
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

import blockformer
from blockformer import last_complete_checkpoint


def tiny_model():
    return blockformer.BlockformerDecoderForCausalLM(config("qwen3", num_hidden_layers=1, initializer_range=0.1))


def train(folder, steps):
    """Some steps, with a checkpoint after each."""
    rows = [{"input_ids": row, "labels": row} for row in token_ids(16, 6)]
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(folder), max_steps=steps, save_steps=1, per_device_train_batch_size=2, **quiet)
    Trainer(tiny_model(), arguments, train_dataset=rows).train()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with the checkpoints 1, 2 and 10."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, steps=2)
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-10")
    state = json.loads((folder / "checkpoint-10/trainer_state.json").read_text())
    (folder / "checkpoint-10/trainer_state.json").write_text(json.dumps({**state, "global_step": 10}))
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def warnings(caplog):
    """What the library's logger says."""
    import logging

    library = logging.getLogger("transformers")
    library.propagate, before = True, library.propagate
    yield caplog
    library.propagate = before


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_highest_number_counts_and_nothing_is_said(run, warnings, monkeypatch, backwards):
    listed = sorted(run.iterdir(), reverse=backwards)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(listed))
    assert last_complete_checkpoint(run) == str(run / "checkpoint-10")
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-10")
    assert not warnings.text


def test_nothing_to_go_on_from(tmp_path, warnings):
    assert last_complete_checkpoint(tmp_path / "none") is None
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").touch()
    assert last_complete_checkpoint(tmp_path) is None
    assert not warnings.text
    (tmp_path / "checkpoint-3").mkdir()
    assert last_complete_checkpoint(tmp_path) is None
    assert "checkpoint-3 is not complete: trainer_state.json is missing." in warnings.text
    assert "starts from scratch" in warnings.text


FILES = ["trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [os.unlink, halve, lambda path: os.truncate(path, 0)], ids=["gone", "half", "empty"])
def test_a_checkpoint_that_lacks_anything_is_passed_over_by_name(run, warnings, file, damage):
    damage(run / "checkpoint-10" / file)
    damage(run / "checkpoint-2" / file)
    assert last_complete_checkpoint(run) == str(run / "checkpoint-1")
    for step in (10, 2):
        assert f"checkpoint-{step} is not complete" in warnings.text
    assert f"resumes from {run / 'checkpoint-1'}." in warnings.text


def test_other_files_must_be_whole_too(run):
    halve(run / "checkpoint-10/training_args.bin")
    halve(run / "checkpoint-2/config.json")
    assert last_complete_checkpoint(run) == str(run / "checkpoint-1")


def test_a_state_of_another_step_is_no_state_of_this_one(run):
    shutil.copy(run / "checkpoint-2/trainer_state.json", run / "checkpoint-10")
    assert last_complete_checkpoint(run) == str(run / "checkpoint-2")


def test_shards_must_all_be_there(run):
    model, folder = tiny_model(), run / "checkpoint-10"
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    assert last_complete_checkpoint(run) == str(folder)
    next(folder.glob("model-00001*")).unlink()
    assert last_complete_checkpoint(run) == str(run / "checkpoint-2")


def test_the_random_states_of_all_processes(run, warnings):
    folder = run / "checkpoint-10"
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    assert last_complete_checkpoint(run) == str(run / "checkpoint-2")
    assert "random states of some processes" in warnings.text
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_2.pth")
    assert last_complete_checkpoint(run) == str(run / "checkpoint-2")
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_1.pth")
    assert last_complete_checkpoint(run) == str(folder)


def test_checkpoints_of_fsdp_and_deepspeed(run):
    folder = run / "checkpoint-10"
    for old, new in (("model.safetensors", "pytorch_model_fsdp_0"), ("optimizer.pt", "optimizer_0")):
        (folder / old).unlink()
        (folder / new).mkdir()
        assert last_complete_checkpoint(run) == str(run / "checkpoint-2")
        (folder / new / ".metadata").touch()
    assert last_complete_checkpoint(run) == str(folder)
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.rmtree(folder / name)
    (folder / "latest").write_text("global_step10")
    assert last_complete_checkpoint(run) == str(run / "checkpoint-2")
    (folder / "global_step10").mkdir()
    shutil.copy(folder / "scheduler.pt", folder / "global_step10" / "mp_rank_00_model_states.pt")
    assert last_complete_checkpoint(run) == str(folder)
    halve(folder / "global_step10" / "mp_rank_00_model_states.pt")
    assert last_complete_checkpoint(run) == str(run / "checkpoint-2")


def test_weights_of_another_model_are_not_gone_on_from(tmp_path):
    train(tmp_path, steps=1)
    checkpoint = tmp_path / "checkpoint-1"
    assert last_complete_checkpoint(tmp_path) == str(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {name.replace("q_norm", "query_norm"): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, checkpoint / "model.safetensors", {"format": "pt"})
    message = r"checkpoint-1: weights of a BlockformerDecoderForCausalLM are missing(.|\n)*self_attn.q_norm.weight"
    with pytest.raises(ValueError, match=message):
        last_complete_checkpoint(tmp_path)


def killed_runs(processes, folder, every=False) -> dict[str, Any]:
    """What came of runs that were killed, at some calls of a save or at every one."""
    done = processes.run(
        program("killed_training"), folder, "every" if every else "", folder=Path(__file__).parents[1], elsewhere=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}


@pytest.fixture(scope="module")
def killed(processes, tmp_path_factory):
    return killed_runs(processes, tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("step", [1, 5])
def test_a_killed_run_ends_with_the_same_losses_and_weights(killed, step):
    (status, nothing), (_, resumed) = killed[f"step {step}"]
    assert (status, nothing) == (signal.SIGKILL, None)
    assert len(killed["whole"][0]) == 6
    assert resumed == killed["whole"]


def check_points(found):
    places = [place for place, *_ in found["points"]]
    for file in FILES:
        assert any(file in place for place in places), places
    written = [not place.startswith("unlink") for place in places]
    last = max(n for n, place in enumerate(places) if "trainer_state.json" in place and written[n])
    for number, (place, status, highest, chosen, resumed) in enumerate(found["points"]):
        assert status == signal.SIGKILL, place
        # The new one counts from its last file on; then the old one goes, file by file.
        assert chosen == ("checkpoint-4" if number > last else "checkpoint-2"), place
        assert highest == "checkpoint-4" or place.startswith("mkdir"), place
        assert resumed in (None, True), place
    assert any(place.startswith("unlink") for place in places[last:])
    resumed = [chosen for *_, chosen, was_resumed in found["points"] if was_resumed]
    assert set(resumed) == {"checkpoint-2", "checkpoint-4"}
    assert "checkpoint-4 is not complete: trainer_state.json is missing. Training resumes from" in found["said"]


def test_a_run_killed_in_a_save_goes_on_from_the_last_complete_checkpoint(killed):
    check_points(killed)


@pytest.mark.exhaustive
def test_a_run_killed_anywhere_in_a_save_ends_as_if_it_had_not_been(processes, tmp_path):
    found = killed_runs(processes, tmp_path, every=True)
    check_points(found)
    assert all(resumed for *_, resumed in found["points"])
    print(f"{len(found['points'])} kill points")
