"""Run other people's tools on our models and on transformers' own, and write the table of docs/clients.md.

Each tool has a script beside this one, which runs in an environment of its own where the tool needs packages that the
first one lacks. A row that is not the same on both sides must say whose fault it is.

Usage: python scripts/clients [--quick] [--fresh] [CLIENT ...]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from environments import ROOT, build  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]


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


def run(name: str, python: str | Path, models: Path, quick: bool) -> list[dict]:
    """The rows of a client.

    Raises:
        SystemExit: its script failed, or gave no row.
    """
    client, start = CLIENTS[name], time.perf_counter()
    command = [
        python,
        HERE / client.script,
        *([models] if client.models else []),
        *((client.quick or []) if quick else []),
    ]
    home = models / f"home-{name}"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(home)},
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows or (done.returncode and client.models):
        raise SystemExit(f"{client.script} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    lines = [f"\n{name}, {time.perf_counter() - start:.0f} seconds"]
    for row in rows:
        lines.append(f"  {row['job']:<52}{'same' if row['same'] else row['note'] or 'NOT EXPLAINED'}")
        if not row["same"]:
            lines += [f"      Blockformer: {row['ours']}", f"      transformers: {row['theirs']}"]
    print("\n".join(lines), flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """Rows as Markdown; jobs with the same result on several models are one line."""
    lines: dict[tuple, list[str]] = {}
    for row in rows:
        job, _, model = row["job"].partition(": ")
        note = row["note"]
        if row["same"]:
            note = "the same" if not note or note.startswith("largest") else f"the same, but {note}"
        lines.setdefault((job, row["ours"], row["theirs"], note), []).append(model)
    text = [
        f"`{rows[0]['client']}` {rows[0]['version']}",
        "",
        "| job | models | Blockformer | transformers | results |",
    ]
    text.append("|---|---|---|---|---|")
    for (job, ours, theirs, note), models in lines.items():
        cells = job, ", ".join(filter(None, models)), ours, theirs, note
        text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(text)


def put(page: str, name: str, rows: list[dict]) -> str:
    """The page with a client's table between its two marks.

    Raises:
        SystemExit: the page has no such marks.
    """
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE.name} has no marks for {name}")
    return before + begin + table(rows) + end + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"default: all of {', '.join(CLIENTS)}")
    parser.add_argument("--quick", action="store_true", help="what every change is tried with; the page stays as it is")
    parser.add_argument("--fresh", action="store_true", help="build the environments anew")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(CLIENTS):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    quick = [name for name, client in CLIENTS.items() if client.quick is not None]
    names = options.clients or (quick if options.quick else list(CLIENTS))
    unexplained = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        pythons = {name: build_for(name, options.fresh) for name in names}
        subprocess.run([sys.executable, HERE / "models.py", folder], check=True, stderr=subprocess.DEVNULL)
        waiting = [pool.submit(run, name, pythons[name], Path(folder), options.quick) for name in names]
        for name, done in zip(names, waiting, strict=True):
            rows = done.result()
            unexplained += sum(not row["same"] and not row["note"] for row in rows)
            if not options.quick:
                PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), name, rows), encoding="utf-8")
    if unexplained:
        print(f"\n{unexplained} rows differ and do not say whose fault it is")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
