"""Draw the pictures of the docs into docs/pictures/, as SVG.

What a picture shows of the core is computed by the core: sinusoids, masks, buckets. The output is the same bytes on
every run, and `tests/test_docs.py` draws again and compares.

Usage: python scripts/draw_pictures.py [--output FOLDER]
"""

import argparse
from pathlib import Path

from blockformer.pictures import PICTURES

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8", newline="\n")
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
