"""Train a small model with `Trainer` for so many minutes, and draw its loss curve."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from ..data.corpus import Blocks
from ..training.budget import Budget, BudgetTrainer
from ..training.callbacks import StopOnNonFiniteLoss


def quickest_threads(step: Callable[[], object], repeats: int = 3) -> int:
    """The number of CPU threads that some work is quickest with; torch's own number is left as it was.

    A small model gains little from many threads, and on a busy machine they wait for each other.
    """
    before = torch.get_num_threads()
    best: dict[int, float] = {}
    try:
        for threads in sorted({before, *(count for count in (1, 2, 4, 8) if count < before)}):
            torch.set_num_threads(threads)
            step()
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            best[threads] = min(times)
    finally:
        torch.set_num_threads(before)
    return min(best, key=lambda threads: best[threads])


@contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Run a block with so many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Curve:
    """Losses in nats per token, each with the tokens trained on until then."""

    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class TrainingRun:
    """The result of a training run."""

    steps: int
    tokens: int
    seconds: float
    curve: Curve


class BudgetCallback(TrainerCallback):
    """Stops on time, asks for a look at the held-out text now and then, and moves the progress bar."""

    def __init__(self, budget: Budget, console: Console, tokens_per_step: int, evaluations: int) -> None:
        self.budget = budget
        self.tokens_per_step = tokens_per_step
        self.evaluations = evaluations
        self.evaluated = 0
        self.curve = Curve()
        self.losses = {"loss": "-", "eval_loss": "-"}
        self.bar = Progress(
            TextColumn("  training"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("step {task.fields[step]}  loss {task.fields[loss]}  held out {task.fields[eval_loss]}"),
            console=console,
        )
        self.task = self.bar.add_task("training", total=1.0, step=0, loss="-", eval_loss="-")

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar.start()

    def on_step_end(self, args, state, control, **kwargs):
        used = self.budget.used(state.global_step)
        self.bar.update(self.task, completed=used, step=state.global_step)
        if used >= 1 or int(used * self.evaluations) > self.evaluated:
            self.evaluated = int(used * self.evaluations)
            control.should_evaluate = control.should_log = True
        control.should_training_stop = control.should_training_stop or used >= 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, points in (("loss", self.curve.train), ("eval_loss", self.curve.held_out)):
            if logs and name in logs:
                points.append((state.global_step * self.tokens_per_step, float(logs[name])))
                self.losses[name] = f"{float(logs[name]):.3f}"
        self.bar.update(self.task, loss=self.losses["loss"], eval_loss=self.losses["eval_loss"])

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.stop()


def train(
    model: PreTrainedModel,
    train_blocks: Blocks,
    held_out_blocks: Blocks,
    budget: Budget,
    console: Console,
    *,
    batch: int,
    block_length: int,
    learning_rate: float,
    seed: int = 0,
    evaluations: int = 12,
) -> TrainingRun:
    """Train in place with `Trainer`, on whatever device it picks; the model comes back on the CPU, in eval mode.

    Args:
        model: a causal language model.
        train_blocks: rows of `block_length` tokens with labels.
        held_out_blocks: a few such rows of other text, for the curve.
        budget: how long.
        console: where the progress bar goes.
        batch: rows in one step.
        block_length: tokens in one row.
        learning_rate: its peak.
        seed: of the order of the rows and of dropout.
        evaluations: how often the held-out loss is taken on the way.

    Raises:
        FloatingPointError: a loss that is not finite, with its step.
    """
    use_cache = model.config.use_cache
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            max_steps=budget.max_steps,
            learning_rate=learning_rate,
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            logging_steps=10,
            logging_first_step=True,
            prediction_loss_only=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=seed,
        )
        trainer = BudgetTrainer(model, arguments, train_dataset=train_blocks, eval_dataset=held_out_blocks)
        trainer.budget = budget
        tokens_per_step = arguments.train_batch_size * block_length
        callback = BudgetCallback(budget, console, tokens_per_step, evaluations)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(callback)
        trainer.add_callback(StopOnNonFiniteLoss())
        threads = torch.get_num_threads()
        if arguments.device.type == "cpu":
            rows = torch.stack([train_blocks[index]["input_ids"] for index in range(min(batch, len(train_blocks)))])
            model.train()
            threads = quickest_threads(lambda: (model(input_ids=rows, labels=rows).loss.backward(), model.zero_grad()))
        start = time.perf_counter()
        try:
            with with_threads(threads):
                trainer.train()
        finally:
            callback.bar.stop()
        seconds = time.perf_counter() - start
    model.config.use_cache = use_cache
    model.to("cpu").eval()
    steps = trainer.state.global_step
    return TrainingRun(steps=steps, tokens=steps * tokens_per_step, seconds=seconds, curve=callback.curve)


def draw(curve: Curve, unigram: float, path: Path) -> None:
    """Write the loss curves as a PNG.

    Args:
        curve: what training recorded.
        unigram: the baseline's held-out loss in nats per token.
        path: the picture's file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name, points, style in (("training", curve.train, "-"), ("held out", curve.held_out, "o-")):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, markersize=3, linewidth=1.2)
    axes.axhline(unigram, color="gray", linestyle="--", linewidth=1, label="unigram baseline, held out")
    axes.set(xlabel="tokens trained on", ylabel="loss (nats per token)", title="Loss on the standard library's sources")
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
