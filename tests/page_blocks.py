"""A block of a page, for tests that first make what it needs."""

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def block(page, words):
    """The only fenced block of a page with these words."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (found,) = (body for body in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S) if words in body)
    return found


def run(page, words):
    """Run a block as a script in the folder where the test is; return its names."""
    script = Path("block.py")
    script.write_text(block(page, words), encoding="utf-8")
    return runpy.run_path(str(script), run_name="__main__")
