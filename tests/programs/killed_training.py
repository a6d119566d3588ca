"""Train, be killed at a step or inside a save, and go on: what came of each run."""

import builtins
import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, os.getcwd())  # where `pairs` is
import torch
import transformers.modeling_utils
from pairs import config, token_ids
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import blockformer
from blockformer import last_complete_checkpoint

base = Path(sys.argv[1])
torch.set_num_threads(1)
logging.disable_progress_bar()
dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
rows = [{"input_ids": row, "labels": row} for row in token_ids(10, 6)]


def train(folder, result, *callbacks):
    # the last of six checkpoints replaces the one before
    arguments = TrainingArguments(
        str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        save_steps=2,
        save_total_limit=1,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=3,
    )
    torch.manual_seed(5)
    settings = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "initializer_range": 0.1}
    model = blockformer.BlockformerDecoderForCausalLM(config("qwen3", **settings, **dropout))
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: weight.numpy().tobytes().hex() for name, weight in model.state_dict().items()}
    digest = hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()
    Path(result).write_text(json.dumps([losses, digest]))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_substep_end(self, args, state, control, **kwargs):
        pass

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            die()


class DieInSave(TrainerCallback):
    # Kills at the limit-th write, rename, mkdir or unlink of the second checkpoint's save; a write after half of it.
    def __init__(self, limit, report):
        self.limit, self.report, self.count = limit, report, 0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.arm()

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os._exit(0)  # the calls of this save are all listed

    def reached(self, name, path):
        self.count += 1
        if self.limit == 0:
            os.write(self.report, f"{name} {Path(str(path)).name}\n".encode())
        return self.count == self.limit

    def arm(self):
        def half_of(name, real, place):
            def call(*args, **kwargs):
                if self.reached(f"start of {name}", args[place]):
                    die()
                done = real(*args, **kwargs)
                if self.reached(f"half of {name}", args[place]):
                    os.truncate(args[place], os.path.getsize(args[place]) // 2)
                    die()
                return done

            return call

        torch.save = half_of("torch.save", torch.save, 1)
        hub = transformers.modeling_utils
        hub.safe_save_file = half_of("save_file", hub.safe_save_file, 1)
        real_open = builtins.open

        def counted_open(file, mode="r", *args, **kwargs):
            if "w" not in mode or not str(file).startswith(str(base)) or str(file).endswith((".pt", ".pth", ".bin")):
                return real_open(file, mode, *args, **kwargs)
            if self.reached("open", file):
                die()
            opened = real_open(file, mode, *args, **kwargs)
            write = opened.write

            def counted_write(text):
                if self.reached("half of write", file):
                    write(text[: len(text) // 2])
                    opened.flush()
                    die()
                return write(text)

            opened.write = counted_write
            return opened

        builtins.open = counted_open

        def before(name, real):
            def call(path, *args, **kwargs):
                if self.reached(name, path):
                    die()
                return real(path, *args, **kwargs)

            return call

        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "remove"):
            setattr(os, name, before(name, getattr(os, name)))


def fork(work, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def answer(folder, *callbacks):
    result = base / "result.json"
    result.unlink(missing_ok=True)
    status = fork(train, folder, result, *callbacks)
    return [status, json.loads(result.read_text()) if result.exists() else None]


whole = answer(base / "whole")[1]
found = {"whole": whole}
for step in (1, 5):
    killed = answer(base / f"at{step}", DieAt(step))
    found[f"step {step}"] = [killed, answer(base / f"at{step}")]
every = bool(sys.argv[2])
receive, report = os.pipe()
fork(train, base / "listed", base / "none", DieInSave(0, report))
os.close(report)
places = os.fdopen(receive).read().splitlines()
# One call of each kind for each file that a checkpoint needs, and of the removal of the old one; or all.
wanted, seen = ("safetensors", "optimizer", "scheduler", "rng_state", "trainer_state", "unlink"), set()
points = []
for limit, place in enumerate(places, start=1):
    kind = next((word for word in wanted if word in place), None)
    if every or (kind and not place.startswith("start") and kind not in seen):
        seen.add(kind)
        folder = base / f"save{limit}"
        status = fork(train, folder, base / "none", DieInSave(limit, report))
        highest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:])).name
        chosen = last_complete_checkpoint(folder)
        is_resumed = every or kind in ("optimizer", "unlink")
        resumed = answer(folder)[1] == whole if is_resumed else None
        points.append([place, status, highest, chosen and Path(chosen).name, resumed])
        shutil.rmtree(folder)
found["points"] = points
print(json.dumps(found))
