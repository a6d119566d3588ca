"""Run the blocks of a page one after the other, as a reader would; print a JSON list of what each wrote.

Arguments: a JSON list of [language, body], where a `console` block has one command a line, behind `$ `; and the folder
of `short_demo.py` where the demo shall be short.
"""

import contextlib
import importlib.util
import io
import json
import os
import runpy
import shlex
import subprocess
import sys

os.environ.update(COLUMNS="90", TERM="dumb", NO_COLOR="1")

from blockformer.cli import main
from blockformer.model.axes import BLOCKS


@contextlib.contextmanager
def no_blocks():
    """A command is a process of its own: it knows no block that the page's Python has registered."""
    before = {axis: dict(known) for axis, known in BLOCKS.items()}
    try:
        for known in BLOCKS.values():
            known.clear()
        yield
    finally:
        BLOCKS.clear()
        BLOCKS.update(before)


def run_command(command):
    words = shlex.split(command)
    if "|" in words:  # echo "a line" | blockformer chat ...
        bar = words.index("|")
        sys.stdin, words = io.StringIO(" ".join(words[1:bar]) + "\n"), words[bar + 1 :]
    if words[0] not in ("blockformer", "python"):
        print(subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout, end="")
        return
    sys.argv = words[1:] if words[0] == "python" else words
    try:
        with no_blocks():
            runpy.run_path(words[1], run_name="__main__") if words[0] == "python" else main(words[1:])
    except SystemExit as end:
        if end.code:
            print(f"(exit status {end.code})")


def is_runnable(body):
    """Whether the package is here that a block's first line, `# needs NAME`, asks for."""
    first = body.partition("\n")[0]
    return not first.startswith("# needs ") or importlib.util.find_spec(first.removeprefix("# needs ")) is not None


def run(blocks):
    written, namespace = [], {"__name__": "__main__"}
    for language, body in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if language == "python" and is_runnable(body):
                exec(compile(body, "the page", "exec"), namespace)
            elif language == "console":
                with contextlib.redirect_stderr(out):
                    for line in body.splitlines():
                        run_command(line.removeprefix("$ "))
        written.append(out.getvalue())
    return written


blocks, *tests = sys.argv[1:]
if tests:
    import pytest

    sys.path += tests
    from short_demo import shorten

    shorten(pytest.MonkeyPatch())
print(json.dumps(run(json.loads(blocks))))
