"""Draw a translator's cross-attention, source against target.

    python examples/attention_picture.py translator "March 5th, 2021" "three hundred and five"

Each row is a character that was written, each column a word that was read, and a cell says how much of the attention of
that character's step went to that word.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

# With this package imported, the Auto classes take its classes: the repo's own code is not needed.
from blockformer.demo.cross_attention import NO_MATPLOTLIB, draw_or_say_why_not


def main(command_line=None) -> None:
    """Load a translator, translate, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repo", help="folder or Hub id of an encoder-decoder of Blockformer")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="texts to translate; one panel each")
    parser.add_argument("--output", type=Path, default=Path("cross-attention.svg"), help="an SVG file to write")
    parser.add_argument("--layer", type=int, help="layer of the decoder, from 0 (default: the most decided one)")
    arguments = parser.parse_args(command_line)

    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(arguments.repo).eval()
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.repo}: no encoder-decoder of Blockformer: {str(error).partition(chr(10))[0]}")
    if arguments.layer is not None and not 0 <= arguments.layer < model.config.decoder_layers:
        parser.error(f"--layer must be 0 to {model.config.decoder_layers - 1}, not {arguments.layer}")
    tokenizer = AutoTokenizer.from_pretrained(arguments.repo)
    message = draw_or_say_why_not(model, tokenizer, arguments.texts, arguments.output, arguments.layer)
    print(message)
    if message == NO_MATPLOTLIB:
        sys.exit(1)


if __name__ == "__main__":
    main()
