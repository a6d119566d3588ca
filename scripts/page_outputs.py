"""Run the blocks of pages and write below each what it printed, where the page shows an output.

Usage: python scripts/page_outputs.py docs/publish.md ...

A block of `python` or `console` may be followed by one of `text` or `log`. `text` is what it prints everywhere; the
tests compare it, except for durations. `log` is what it printed here once: figures that differ from machine to machine.
"""

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$(?:(\n\n?)```(text|log)\n(.*?)^```$)?", re.M | re.S)
STATUS = re.compile(r"^\(exit status .*\)$", re.M)
SECONDS = re.compile(r"\d+(\.\d+)? s\b")
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, body) of what a page runs."""
    return [(found[1], found[2]) for found in BLOCK.finditer(text)]


def settled(output: str) -> str:
    """An output without what differs from run to run."""
    lines = (line.rstrip() for line in SECONDS.sub("1 s", output).strip("\n").splitlines())
    return "\n".join(lines) + "\n"


def statuses(output: str) -> list[str]:
    """The lines of an output that say how its commands failed."""
    return STATUS.findall(output)


def shown(text: str) -> list[tuple[str, str]]:
    """(`text`, `log` or "", output) below each block that a page runs."""
    return [(found[4] or "", found[5] or "") for found in BLOCK.finditer(text)]


def written(text: str, outputs: list[str]) -> str:
    """The page with these outputs in place of those that it shows."""
    remaining = iter(outputs)

    def block(found: re.Match) -> str:
        output = next(remaining)
        if not found[4] or not output:  # nothing is shown, or the block was left out
            return found[0]
        lines = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
        return f"```{found[1]}\n{found[2]}```{found[3]}```{found[4]}\n{lines}\n```"

    return BLOCK.sub(block, text)


@contextlib.contextmanager
def reader(folder: Path, is_demo_short: bool = False) -> Iterator[Callable[[Path], list[str]]]:
    """A function that gives what the blocks of a page print.

    Each page has a process and a folder of its own, and all have one Hub on loopback. A block that fails is an
    AssertionError.

    Args:
        folder: for everything that they write.
        is_demo_short: `blockformer demo --quick` trains and searches less than it says (`tests/short_demo.py`).
    """
    tests = ROOT / "tests"
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))
    from fork_server import ForkServer, program
    from hub_server import Hub

    from blockformer.demo.search import encoder_folder

    hub = Hub({"hf_ann": "ann"})
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_ann"}
    settings |= dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"), "1")
    server = ForkServer(folder / "home", settings)

    def run(page: Path) -> list[str]:
        desk = Path(tempfile.mkdtemp(dir=folder))
        (desk / ENCODER).parent.mkdir(parents=True)
        (desk / ENCODER).symlink_to(encoder_folder())
        (desk / "examples").symlink_to(ROOT / "examples")
        job = json.dumps(blocks(page.read_text(encoding="utf-8")))
        short = [tests] if is_demo_short else []
        said = json.loads(server.said(program("run_page"), job, *short, folder=desk, elsewhere=False))
        return [each.replace(hub.url, "https://huggingface.co").replace(f"{desk}/", "") for each in said]

    try:
        yield run
    finally:
        server.close()
        hub.stop()


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder, reader(Path(folder)) as run:
        for page in map(Path, sys.argv[1:]):
            page.write_text(written(page.read_text(encoding="utf-8"), run(page)), encoding="utf-8")


if __name__ == "__main__":
    main()
