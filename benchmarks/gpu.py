"""Whether a GPU answers rightly, and how fast: the first thing to run where there is one.

Usage: python benchmarks/gpu.py [--output FOLDER] [--minutes N] [--only NAME ...] [--time WORK ...] [--tiny]

It needs torch and transformers, no network and no installation of this project. Every way is compared with float64 on
the CPU and with transformers' own class on the device, and how often the host waits is counted. Then encoders, prompts,
training steps and decoding are timed, both libraries taking turns. It writes `gpu.json` and `gpu.md`. Without a GPU it
checks what a CPU can, and times nothing. It ends with status 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from gpu_checks import Check, checks, waits
from gpu_models import official_models
from gpu_times import WORKS, Time
from gpu_uses import uses

NAMES = [*official_models(), "uses", "waits"]


def markdown(machine: dict, found: list[Check], times: list[Time], left_out: list[str]) -> str:
    """Both tables."""
    lines = [
        f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}.", "",
        "| model | way | dtype | from float64: Blockformer | transformers | |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for each in found:
        verdict = "right" if each.is_right else f"**wrong** {each.note}"
        theirs = "" if math.isnan(each.theirs) else f"{each.theirs:.1e}"
        lines.append(f"| {each.family} | {each.way} | {each.dtype} | {each.ours:.1e} | {theirs} | {verdict} |")
    if times:
        lines += [
            "",
            "| work | dtype | unit | Blockformer, best / median | transformers | ratio | |",
            "|---|---|---|---|---|---|---|",
        ]
    for each in times:
        pairs = [f"{best:,.2f} / {median:,.2f}" for best, median in (each.ours, each.theirs)]
        lines.append(
            f"| {each.work} | {each.dtype} | {each.unit} | {pairs[0]} | {pairs[1]} | {each.ratio:.2f} | {each.note} |"
        )
    lines += [f"\nNot measured: {what}." for what in left_out]
    return "\n".join(lines) + "\n"


def checked_apart(names: list[str]) -> Iterator[Check]:
    """The checks of each family in a process of its own, several at once: an error of a kernel ends its process."""
    count = max(1, min(len(names), (os.cpu_count() or 2) // 2))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        for rows in pool.map(lambda name: _checked(name, Path(folder) / name), names):
            yield from rows


def _checked(name: str, file: Path) -> list[Check]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", name, str(file)], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    rows = [Check(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:300]
        rows.append(Check(name, "what follows", "", float("nan"), float("nan"), False, last))
    for each in rows:
        verdict = "right" if each.is_right else "WRONG"
        distance = f"{each.ours:.1e}" + ("" if math.isnan(each.theirs) else f", transformers {each.theirs:.1e}")
        print(f"{each.family}, {each.way}, {each.dtype}: {distance}: {verdict} {each.note}", flush=True)
    if not all(each.is_right for each in rows):
        print(done.stderr[-6000:], flush=True)
    return rows


def check_one(name: str, file: Path, device: str) -> None:
    """Check a family, the uses or the waits, and write a line as soon as each answer is there."""
    with file.open("w", encoding="utf-8") as lines:
        others = {"uses": uses, "waits": waits}
        for each in others[name](device) if name in others else checks(device, name):
            print(json.dumps(asdict(each)), file=lines, flush=True)


def timed(works: list[str], tiny: bool, end: float) -> tuple[list[Time], list[str]]:
    """What was timed, and what was not."""
    times: list[Time] = []
    left_out: list[str] = []
    for name in works:
        try:
            for row in WORKS[name](tiny):
                times.append(row)
                print(
                    f"{row.work}, {row.dtype}: {row.ours[1]:.2f} {row.unit}, ratio {row.ratio:.2f} {row.note}",
                    flush=True,
                )
                if time.monotonic() > end:
                    left_out.append(f"what follows in {name}, out of time")
                    break
        except Exception as problem:  # one failure must not lose what is known
            traceback.print_exc()
            left_out.append(f"{name}, {''.join(traceback.format_exception_only(problem)).strip()[:300]}")
        gc.collect()
        torch.cuda.empty_cache()
    return times, left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="where both files go")
    parser.add_argument("--minutes", type=float, default=8, help="after so many nothing new is timed")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES, help="check these only")
    parser.add_argument("--time", nargs="*", choices=list(WORKS), default=list(WORKS), help="time these only")
    parser.add_argument("--tiny", action="store_true", help="time shapes of no interest, to try the code")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.one:
        check_one(options.one[0], Path(options.one[1]), device)
        return 0
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU: checked on the CPU, nothing timed"
    machine = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    found = list(checked_apart(options.only))
    times, left_out = timed(options.time if device == "cuda" else [], options.tiny, end)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = {
        "checks": [asdict(each) for each in found],
        "times": [{**asdict(each), "ratio": each.ratio} for each in times],
    }
    report = {"machine": machine, **rows, "not_measured": left_out}
    (options.output / "gpu.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    table = markdown(machine, found, times, left_out)
    (options.output / "gpu.md").write_text(table, encoding="utf-8")
    print(f"\n{table}\nwritten to {options.output}/gpu.json and gpu.md")
    return 0 if all(each.is_right for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
