"""Loading a checkpoint, compared with transformers, and converting it both ways, compared with a plain copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from memory import peak_of_command
from transformers import GPT2LMHeadModel, PreTrainedModel, Qwen3ForCausalLM
from workloads import Row, Shape, check_same, interleaved, make_row

import blockformer
from blockformer.conversion import convert

COMMAND = [sys.executable, "-c", "from blockformer.cli import main; main()", "convert", "--no-verify"]
LOAD_AND_SAVE = (
    "import sys; from transformers import AutoModelForCausalLM as Auto; "
    "Auto.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
)


def save_both(pair, folder: Path) -> tuple[Path, Path]:
    """The checkpoint in transformers' layout, and the repo in ours that `convert` makes of it."""
    official, repo = folder / "official", folder / "repo"
    pair[1].save_pretrained(official)
    convert(official, repo, verify=False)
    return repo, official


def load(folders: tuple[Path, Path], shape: Shape, rounds: int, read_gbs: float) -> list[Row]:
    """Seconds of `from_pretrained`, by itself and with the logits of one token, the files in the page cache.

    By itself it may map the weights without reading them, so it has no limit; the token reads them all.

    Raises:
        RuntimeError: the models do not compute the same, so that timing them would compare nothing.
    """
    peer = {"qwen3": Qwen3ForCausalLM, "gpt2": GPT2LMHeadModel}[shape.family]
    classes = (blockformer.BlockformerDecoderForCausalLM, peer)
    sides = list(zip(classes, folders, strict=True))
    ids = torch.randint(0, shape.vocab_size, (1, 24))
    with torch.no_grad():
        models = [kind.from_pretrained(folder).eval() for kind, folder in sides]
        check_same(shape.name, models[0].dtype, [model(ids).logits for model in models])
    dtype = models[0].dtype
    del models

    @torch.no_grad()
    def once(kind: type[PreTrainedModel], folder: Path, with_token: bool) -> list[float]:
        start = time.perf_counter()
        model = kind.from_pretrained(folder)
        if with_token:
            model(ids[:, :1])
        return [time.perf_counter() - start]

    rows = []
    read = sum(path.stat().st_size for path in folders[0].glob("*.safetensors")) / (read_gbs * 1e9)
    for work, with_token, limit in (("load", False, 0.0), ("load, first token", True, read)):
        times = interleaved(
            lambda token=with_token: once(*sides[0], token), lambda token=with_token: once(*sides[1], token), rounds
        )
        rows.append(make_row(shape.name, work, dtype, 0, 0, times, limit))
    return rows


def conversions(folders: tuple[Path, Path], shape: Shape, dtype: torch.dtype, rounds: int, folder: Path) -> list[Row]:
    """Converting in both directions: the command, the function in a process that has it imported, peak memory.

    The peer of the times is `cp` of the source and `fsync`, onto the same disk; for the memory it is a process that
    loads and saves the source with transformers. The limit of the memory is the largest tensor.

    Args:
        folder: where targets are made; each is removed once it is measured.
    """
    repo, official = folders
    target = folder / "target"
    largest = shape.vocab_size * shape.hidden_size * dtype.itemsize
    rows = []
    theirs = [_peak([sys.executable, "-c", LOAD_AND_SAVE, str(official), str(target)], target)]
    for source, to in ((official, "blockformer"), (repo, "official")):

        def function(source: Path = source, to: str = to) -> None:
            convert(source, target, to_official=to == "official", verify=False)

        command = [*COMMAND, "--to", to, str(source), str(target)]
        for name, work in (("command", lambda command=command: _run(command)), ("function", function)):
            times = interleaved(
                lambda work=work: _timed(work, target),
                lambda source=source: _timed(lambda: copy(source, target), target),
                rounds,
            )
            limit = min(times[1])
            label = f"convert to {to}, {name}"
            rows.append(make_row(shape.name, label, dtype, 0, 0, times, limit, peer="cp + fsync"))

        mine = [_peak(command, target)]
        rows.append(
            make_row(
                shape.name, f"convert to {to}, whole process", dtype, 0, 0, (mine, theirs), largest,
                unit="bytes", peer="transformers, load and save",
            )
        )  # fmt: skip
    return rows


def copy(source: Path, target: Path) -> None:
    """`cp -r`, and every copied file and the folder on the disk."""
    _run(["cp", "-r", str(source), str(target)])
    for path in [*target.iterdir(), target]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _timed(work: Callable[[], None], target: Path) -> list[float]:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return [seconds]


def _peak(command: list[str], target: Path) -> int:
    peak = peak_of_command(command)
    shutil.rmtree(target)
    return peak


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr}")
