"""One training run with `Trainer`, which can go on from its last checkpoint, and its row."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from .. import __version__
from ..data.corpus import Blocks, Score, model_score
from ..declared_fields import axes_of
from ..model.modeling_decoder import BlockformerDecoderForCausalLM
from ..training.budget import Budget, BudgetTrainer
from ..training.callbacks import StopOnNonFiniteLoss
from ..training.checkpoints import last_complete_checkpoint
from .experiment import Experiment, Run
from .text import Text

# Rows of held-out text for a point of a curve; the score at the end is of all of it.
_ROWS_OF_A_POINT = 32
_ENDLESS = 1 << 40


class _Watch(TrainerCallback):
    """Asks for a point of the curve, and a checkpoint, whenever another part of the budget is used."""

    def __init__(self, budget: Budget, evaluations: int, tell: Callable[[str, float], None]) -> None:
        self.budget, self.evaluations, self.tell = budget, evaluations, tell
        self.points = 0

    def seconds(self) -> float:
        """Seconds of training, those before an interruption included."""
        return time.perf_counter() - (self.budget.start or 0.0)

    def on_train_begin(self, args, state, control, **kwargs):
        # A checkpoint brings the log along, and with it the time that the run had taken.
        before = max((entry.get("seconds", 0.0) for entry in state.log_history), default=0.0)
        self.budget.start = time.perf_counter() - before
        self.points = self._points(state.global_step)
        if state.global_step:
            self.tell("resumed", self.budget.used(state.global_step))

    def _points(self, step: int) -> int:
        return int(self.budget.used(step) * self.evaluations)

    def on_step_end(self, args, state, control, **kwargs):
        used, points = self.budget.used(state.global_step), self._points(state.global_step)
        if points > self.points:
            self.points = points
            control.should_evaluate = control.should_log = True
            control.should_save = used < 1
        control.should_training_stop = control.should_training_stop or used >= 1
        self.tell("", used)

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1]["seconds"] = self.seconds()


def config_of(run: Run) -> dict[str, Any]:
    """The fields of a run's config as plain data."""
    settings = run.config.to_dict()
    return {name: settings[name] for name in axes_of(run.config)}


def train(
    experiment: Experiment, run: Run, text: Text, scratch: Path, tell: Callable[[str, float], None]
) -> dict[str, Any]:
    """Train a run, from its last checkpoint if there is one, and score it on all of the held-out text.

    Weights, order of the data and everything else random come only from the seed. What is held out is the same for
    all runs.

    Args:
        experiment: whose run it is.
        run: the config and the seed.
        text: the experiment's.
        scratch: the folder of its checkpoints.
        tell: called with its news ("resumed" or "") and the share of it that is done.

    Returns:
        Its row. Of a run that diverged, `bits_per_byte` is None and `diverged` says what happened.
    """
    length, tokens = experiment.data.sequence_length, text.tokens(run.config.vocab_size)
    arguments = _arguments(experiment, run, scratch)
    tokens_per_step = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps * length
    steps = experiment.steps(run, tokens_per_step)
    budget = Budget(math.inf if steps else 60 * experiment.budget[1], steps or _ENDLESS)
    arguments.max_steps = budget.max_steps
    rows, some = Blocks(tokens.train, length), Blocks(tokens.held_out, length)
    some.rows = some.rows[:: math.ceil(len(some) / _ROWS_OF_A_POINT)]
    set_seed(run.seed)
    model = BlockformerDecoderForCausalLM(copy.deepcopy(run.config))  # training writes into it
    trainer = (Trainer if steps else BudgetTrainer)(model, arguments, train_dataset=rows, eval_dataset=some)
    trainer.budget = budget
    watch = _Watch(budget, experiment.evaluations, tell)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    trainer.add_callback(StopOnNonFiniteLoss())
    _forget_peak()
    score: Score | None = None
    diverged = None
    try:
        trainer.train(resume_from_checkpoint=last_complete_checkpoint(scratch))
    except FloatingPointError as error:
        diverged = str(error).partition(";")[0]
    seconds, peak = watch.seconds(), _peak_memory()
    if diverged is None:
        # In every process: where the weights are shared out, all must take part.
        score = model_score(trainer.model, tokens.held_out, text.corpus.held_out_bytes, length)
    if score is not None and not math.isfinite(score.loss):
        score, diverged = None, "the loss on the held-out text is not finite"
    log, trained = trainer.state.log_history, trainer.state.global_step * tokens_per_step
    del trainer, model
    gc.collect()
    return {
        "name": run.name,
        "group": run.group,
        "variant": run.variant.name,
        "axis": run.variant.axis,
        "settings": run.variant.settings,
        "width": run.config.hidden_size,
        "seed": run.seed,
        "bits_per_byte": score and score.bits_per_byte,
        "loss": score and score.loss,
        "diverged": diverged,
        "parameters": run.parameters,
        "flops_per_token": run.flops_per_token,
        "flops": run.flops_per_token * trained,
        "steps": trained // tokens_per_step,
        "tokens": trained,
        "epochs": trained / len(tokens.train),
        "seconds": round(seconds, 1),
        "peak_memory": peak,
        # The text's tokens and bytes make bits per byte of the curve's losses, too.
        "held_out_tokens": len(tokens.held_out) - 1,
        "held_out_bytes": text.corpus.held_out_bytes,
        "curve": {
            "train": _points_of(log, "loss", tokens_per_step),
            "held_out": _points_of(log, "eval_loss", tokens_per_step),
        },
        "config": config_of(run),
        "device": arguments.device.type,
        "processes": arguments.world_size,
        "versions": {
            "blockformer": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _arguments(experiment: Experiment, run: Run, scratch: Path) -> TrainingArguments:
    """The experiment's arguments; nothing is logged or saved unless `_Watch` asks for it."""
    return TrainingArguments(
        output_dir=str(scratch),
        seed=run.seed,
        data_seed=run.seed,
        max_steps=_ENDLESS,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        save_total_limit=2,
        prediction_loss_only=True,
        disable_tqdm=True,
        **{"dataloader_pin_memory": torch.accelerator.is_available(), **experiment.training},
    )


def _points_of(log: list[dict[str, float]], name: str, tokens_per_step: int) -> list[list[float]]:
    """[tokens, loss in nats per token] of each entry."""
    return [[int(entry["step"]) * tokens_per_step, round(float(entry[name]), 5)] for entry in log if name in entry]


# Memory


def _forget_peak() -> None:
    """Start measuring the peak anew, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # only Linux has it
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int | None:
    """Bytes: of the GPU's memory, else of this process; None where neither is known for a single run."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
