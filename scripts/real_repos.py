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
what conversion makes of them. Each row is a repo with the files of the original, its tensor names and its entries of
`config.json`, but small: two layers of width 32 with random weights, and a tokenizer of some 450 tokens trained on
Python's sources. The original weights and vocabularies are not used, so the table says nothing about them.

`make test` runs a third of the rows as tests, `make exhaustive` the others. This command writes the page:

    python scripts/real_repos.py

{columns}
"""
MEANINGS = {
    "layout": "known: public copies or logs of the repo show at least its names of tensors or its entries of "
    "`config.json`. remembered: written down from memory. assumed: as the official class writes it, with likely files.",
    "converts": "`convert` works in both directions, with its own comparison of the models.",
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
        cells["converts"] = "yes"
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
    return cell == "yes" or (column == "outputs" and (cell == "0" or cell.startswith("< ")))


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
        lines.append(f"| {' | '.join((record.name, f'`{record.family}`', record.known, *cells.values()))} |")
        print(lines[-1], flush=True)
    count = f"{len(lines) - wrong} of {len(lines)} rows have no error, with transformers {transformers.__version__}."
    print(count)
    if not (arguments.only or arguments.check):
        head = ("checkpoint", "family", "layout", *COLUMNS)
        table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]
        meanings = [f"| {column} | {meaning} |" for column, meaning in MEANINGS.items()]
        introduction = INTRODUCTION.format(columns="\n".join(["| column | what it says |", "|---|---|", *meanings]))
        PAGE.write_text(introduction + f"\n{count}\n\n" + "\n".join(table) + "\n", encoding="utf-8")
    if arguments.check and wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
