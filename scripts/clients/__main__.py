"""Run other people's tools on our models and on transformers' own, and write the table of docs/clients.md.

Each tool has a script next to this one, which runs in an environment of its own where the tool needs packages that the
first one lacks. A row that is not the same on both sides must be one of `accepted.py`, within its bound or with its
error, and what is accepted must happen; otherwise this ends with 1 and names the row.

Usage: python scripts/clients [--quick] [--fresh] [--arguments "..."] [CLIENT ...]
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from common_suite import KINDS  # noqa: E402
from environments import ONE_THREAD, ROOT, build  # noqa: E402
from judging import differs, judge, said  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]


class ScriptFailed(RuntimeError):
    """A tool's script ended with an error, or found nothing."""


@dataclass
class Client:
    """A tool and how it is run.

    Args:
        script: its script in this folder.
        packages: what the first environment lacks; none means that the script runs in that one.
        quick: the arguments with which every change is tried; None for none at all.
        models: whether the script takes the folder of `models.py`.
    """

    script: str
    packages: list[str] = field(default_factory=list)
    quick: list[str] | None = None
    models: bool = True


CLIENTS = {
    "trainer": Client("with_trainer.py", quick=["qwen3", "bert-classifier", "t5"]),
    "peft": Client("with_peft.py", quick=["gpt2", "llama-classifier", "bert-tokens"]),
    "trl": Client("with_trl.py", ["trl==1.16.0"], quick=[]),
    # TRL's environment has `datasets`, which training needs.
    "sentence-transformers": Client("with_sentence_transformers.py", ["trl==1.16.0"], quick=[]),
    "onnx": Client("with_onnx.py", ["onnx", "onnxruntime", "onnxscript"], quick=["bert-encoder", "t5"]),
    "mergekit": Client("with_mergekit.py", ["mergekit==0.1.5"], quick=[]),
    "vllm": Client("with_vllm.py"),  # makes an environment of its own, without ours
    "lm-eval": Client("with_lm_eval.py", ["lm-eval==0.4.13"]),
    "mteb": Client("with_mteb.py", ["mteb==2.26.24"]),
    "nnsight": Client("with_nnsight.py", ["nnsight==0.8.1"]),
    "transformer-lens": Client("with_transformer_lens.py", ["transformer-lens==4.3.0"]),
    "common-suite": Client("common_suite.py", models=False),
}


def build_for(name: str, fresh: bool) -> str | Path:
    """The python of a client's environment."""
    packages = CLIENTS[name].packages
    if not packages:
        return sys.executable
    return build("clients-" + packages[0].partition("==")[0], [*packages, *CONSTRAINTS], fresh)


def run(name: str, python: str | Path, models: Path, arguments: list[str]) -> list[dict]:
    """The rows of a client.

    Args:
        arguments: for its script.

    Raises:
        ScriptFailed: its script failed, or gave no row.
    """
    client, start = CLIENTS[name], time.perf_counter()
    command = [python, HERE / client.script, *([models] if client.models else []), *arguments]
    home = models / f"home-{name}"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={**os.environ, **ONE_THREAD, "HF_HOME": str(home)},
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows or done.returncode:
        raise ScriptFailed(f"{client.script} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    print(f"\n{name}, {time.perf_counter() - start:.0f} seconds", flush=True)
    return rows


def show(rows: list[dict], reasons: list[str | None]) -> None:
    """Print each row; of those that are the same and are many, how many there are."""
    few = len(rows) <= 100
    for row, reason in zip(rows, reasons, strict=True):
        if few or differs(row) or reason is None:
            verdict = "NOT ACCEPTED" if reason is None else "accepted" if reason else "same"
            print(f"  {row['job'] + ': ' + row['model']:<60} {verdict}, {said(row)}")
    if not few:
        print(f"  {sum(not differs(row) for row in rows)} of {len(rows)} rows are the same")
    sys.stdout.flush()


def table(name: str, rows: list[dict], reasons: list[str | None]) -> str:
    """Rows as Markdown; jobs with the same result on several models are one line, in the common suite all of a kind."""
    text = [
        f"`{rows[0]['client']}` {rows[0]['version']}",
        "",
        "| job | models | Blockformer | transformers | results |",
        "|---|---|---|---|---|",
    ]
    for cells in (suite_cells if name == "common-suite" else tool_cells)(rows, reasons):
        text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(text)


def tool_cells(rows: list[dict], reasons: list[str | None]) -> list[tuple]:
    """The cells of each line of a tool's table."""
    lines: dict[tuple, list[str]] = {}
    for row, reason in zip(rows, reasons, strict=True):
        outcomes = (re.split(r"; |\. ", row[side])[0] for side in ("ours", "theirs"))  # of an error its first clause
        lines.setdefault((row["job"], *outcomes, reason or "the same"), []).append(row["model"])
    return [(job, ", ".join(models), *results) for (job, *results), models in lines.items()]


def suite_cells(rows: list[dict], reasons: list[str | None]) -> list[tuple]:
    """The cells of each kind of model: how many tests passed and failed, and each reason with how many it is of."""
    found = []
    for kind in dict.fromkeys(row["model"] for row in rows):
        own = [(row, reason) for row, reason in zip(rows, reasons, strict=True) if row["model"] == kind]
        because = Counter(reason for _, reason in own if reason)
        results = "<br>".join(f"{reason} ({count} test{'s' * (count > 1)})" for reason, count in because.items())
        counts = [counted([row[side] for row, _ in own]) for side in ("ours", "theirs")]
        found.append((KINDS[kind], "", *counts, f"the same, but<br>{results}" if results else "the same"))
    return found


def counted(outcomes: list[str]) -> str:
    """ "N passed, M failed". Skipped tests (no GPU, not for this kind of model) are left out."""
    passed, skipped = (sum(each.startswith(word) for each in outcomes) for word in ("works", "skipped"))
    return f"{passed} passed, {len(outcomes) - passed - skipped} failed"


def put(page: str, name: str, text: str) -> str:
    """The page with a client's table between its two marks.

    Raises:
        SystemExit: the page has no such marks.
    """
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE.name} has no marks for {name}")
    return before + begin + text + end + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"default: all of {', '.join(CLIENTS)}")
    parser.add_argument("--quick", action="store_true", help="a quick selection, as in CI; the page is not changed")
    parser.add_argument("--arguments", help="arguments for the scripts, such as models; the page is not changed")
    parser.add_argument("--fresh", action="store_true", help="rebuild the environments")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(CLIENTS):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    quick = [name for name, client in CLIENTS.items() if client.quick is not None]
    names = options.clients or (quick if options.quick else list(CLIENTS))
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        pythons = {name: build_for(name, options.fresh) for name in names}
        subprocess.run([sys.executable, HERE / "models.py", folder], check=True, stderr=subprocess.DEVNULL)
        waiting = []
        for name in names:
            arguments = (CLIENTS[name].quick or []) if options.quick else shlex.split(options.arguments or "")
            waiting.append((name, arguments, pool.submit(run, name, pythons[name], Path(folder), arguments)))
        for name, arguments, done in waiting:
            try:
                rows = done.result()
            except ScriptFailed as failed:  # the others go on
                complaints.append(str(failed))
                continue
            whole = not arguments  # what a quick run leaves out, it leaves out by arguments
            judged = judge(name, rows, whole)
            show(rows, judged.reasons)
            complaints += judged.complaints
            if whole and not options.quick and not judged.complaints:
                text = put(PAGE.read_text(encoding="utf-8"), name, table(name, rows, judged.reasons))
                PAGE.write_text(text, encoding="utf-8")
    if complaints:
        print("\nThese are not as scripts/clients/accepted.py has them:", *complaints, sep="\n  ")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
