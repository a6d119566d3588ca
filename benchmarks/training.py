"""A training step, forward and backward without an optimizer: its time, and its peak memory in processes of their own.

As a script, `python benchmarks/training.py SIDE FOLDER ROWS LENGTH` does one step of a saved model and prints what it
took of memory as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from pathlib import Path

import torch
from memory import Peak, run_python
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.utils import logging
from workloads import Row, Shape, interleaved, make_row

import blockformer

SIDES = {"ours": blockformer.BlockformerDecoderForCausalLM, "peer": Qwen3ForCausalLM}


def batch(vocab_size: int, rows: int, length: int) -> torch.Tensor:
    """The same random tokens [rows, length] in every process."""
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


def step(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Loss of every token and the gradients of every weight; returns the loss."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item()


def check_same(name: str, dtype: torch.dtype, losses: list[float]) -> None:
    """Compare the losses of two models.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    error = abs(losses[0] - losses[1]) / abs(losses[1])
    if not error <= (1e-5 if dtype == torch.float32 else 5e-3):
        raise RuntimeError(f"{name} in {dtype}: losses {losses} differ by {error:.2g}; nothing is timed")


def time_step(pair, shape: Shape, rows: int, length: int, rounds: int, gemm_gflops: dict[str, float]) -> Row:
    """Seconds of a step, the gradients of the one before freed."""
    ids = batch(shape.vocab_size, rows, length)

    def once(model: PreTrainedModel) -> list[float]:
        start = time.perf_counter()
        losses.append(step(model, ids))
        seconds = time.perf_counter() - start
        model.zero_grad(set_to_none=True)
        return [seconds]

    losses: list[float] = []
    ours, peer = (model.train() for model in pair)
    blockformer.prepare_for_training(ours)
    for model in pair:
        once(model)
    check_same(shape.name, ours.dtype, losses)
    times = interleaved(lambda: once(ours), lambda: once(peer), rounds, warm_up=False)
    # Each weight, the tied head too, is in one product forward and in two backward; so are scores and weighted sums
    weights = sum(parameter.numel() for parameter in ours.parameters())
    tokens = rows * length
    work = 3 * (2 * weights * tokens + 2 * shape.layers * shape.heads * shape.head_dim * tokens * length)
    limit = work / (gemm_gflops[str(ours.dtype).removeprefix("torch.")] * 1e9)
    return make_row(shape.name, "training step", ours.dtype, length, rows, times, limit)


def peak_memory(pair, shape: Shape, rows: int, length: int, rounds: int, folder: Path) -> list[Row]:
    """Peak resident memory of a step: of the whole process, and what the step adds to what was resident before it.

    Every measurement is a fresh process that loads the saved weights and does one step. The limit is the weights and
    their gradients, or only the gradients.

    Args:
        folder: where the weights of both may be saved.
    """
    dtype = pair[0].dtype
    nbytes = sum(parameter.nbytes for parameter in pair[0].parameters())
    for side, model in zip(SIDES, pair, strict=True):
        model.save_pretrained(folder / side)
    whole: dict[str, list[float]] = {side: [] for side in SIDES}
    added: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        losses = []
        for side in SIDES:
            found = run_python([__file__, side, str(folder / side), str(rows), str(length)])
            whole[side].append(found["peak"])
            added[side].append(found["peak"] - found["before"])
            losses.append(found["loss"])
        check_same(shape.name, dtype, losses)
    return [
        make_row(shape.name, work, dtype, length, rows, tuple(values.values()), limit, unit="bytes")
        for work, values, limit in (
            ("training step, whole process", whole, 2 * nbytes),
            ("training step, added to the resident", added, nbytes),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=list(SIDES))
    parser.add_argument("folder")
    parser.add_argument("rows", type=int)
    parser.add_argument("length", type=int)
    options = parser.parse_args()
    logging.disable_progress_bar()
    model = SIDES[options.side].from_pretrained(options.folder).train()
    if options.side == "ours":
        blockformer.prepare_for_training(model)
    ids = batch(model.config.vocab_size, options.rows, options.length)
    for parameter in model.parameters():
        parameter.sum()  # the file is only mapped until it is read
    gc.collect()
    with Peak() as memory:
        loss = step(model, ids)
    if not math.isfinite(loss) or any(parameter.grad is None for parameter in model.parameters()):
        raise RuntimeError("the step left weights without a gradient")
    print(json.dumps({"before": memory.before, "peak": memory.peak, "loss": loss}))


if __name__ == "__main__":
    main()
