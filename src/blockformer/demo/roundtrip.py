"""What a trained model must still give after publishing, and after converting: run each and compare."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, Qwen3ForCausalLM

PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """'
TOLERANCE = 1e-5
"""Of logits, relative to the largest: the same weights in float32, computed in another order."""


class RoundTripError(ValueError):
    """A published or converted model gives other results than the trained one."""


def expectation(model: PreTrainedModel, held_out_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the published model must give again: logits and 16 greedy tokens for two pieces of held-out text."""
    input_ids = held_out_ids[:96].view(2, 48)
    with torch.no_grad():
        logits = model(input_ids).logits
        generated = model.generate(input_ids, do_sample=False, max_new_tokens=16, min_new_tokens=16)
    return {"input_ids": input_ids, "logits": logits, "generated": generated}


def reload_elsewhere(repo: Path, expected: dict[str, torch.Tensor], console: Console, new_tokens: int) -> None:
    """Run fresh.py on the repo in its own process, passing its text on as it comes.

    Raises:
        RoundTripError: it ended with anything but 0; the message has its last lines.
    """
    with tempfile.TemporaryDirectory() as scratch:
        torch.save(expected, Path(scratch) / "expected.pt")
        command = [sys.executable, str(Path(__file__).with_name("fresh.py")), str(repo.resolve())]
        command += [str(Path(scratch) / "expected.pt"), PROMPT, str(new_tokens)]
        # modules of an earlier repo in the user's cache must not help
        environment = {**os.environ, "HF_MODULES_CACHE": str(Path(scratch) / "modules"), "PYTHONIOENCODING": "utf-8"}
        with (
            open(Path(scratch) / "errors", "w+", encoding="utf-8", errors="replace") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, cwd=scratch, env=environment, encoding="utf-8"
            ) as process,
        ):
            assert process.stdout is not None
            for character in iter(lambda: process.stdout.read(1), ""):
                console.print(character, end="", style="green", markup=False, highlight=False, soft_wrap=True)
            code = process.wait()
            errors.seek(0)
            said = errors.read().strip().splitlines()[-12:]
    if code:
        raise RoundTripError("the published repo failed in a fresh process:\n" + "\n".join(said))


def convert_and_compare(repo: Path, official_folder: Path, expected: dict[str, torch.Tensor]) -> float:
    """Convert the repo to the official layout and run transformers' own class on it.

    Returns:
        The largest difference of two logits.

    Raises:
        RoundTripError: logits or greedy text differ.
    """
    from blockformer.conversion import convert

    convert(repo, official_folder, to_official=True)
    official = Qwen3ForCausalLM.from_pretrained(official_folder).eval()
    given = expectation(official, expected["input_ids"].flatten())
    difference = (given["logits"] - expected["logits"]).abs().max().item()
    if difference > TOLERANCE * max(1.0, expected["logits"].abs().max().item()):
        raise RoundTripError(f"Qwen3ForCausalLM computes other logits: they differ by {difference:.3g}")
    if not torch.equal(given["generated"], expected["generated"]):
        raise RoundTripError("Qwen3ForCausalLM writes another greedy text")
    return difference
