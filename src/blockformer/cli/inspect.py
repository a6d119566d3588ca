"""`blockformer inspect`: a model on paper, in the terminal or as a page."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from blockformer.conversion import ConversionError
from blockformer.conversion.arguments import check_model

from ..files.atomic import write_text
from ..files.errors import printable
from ..files.sizes import format_size

if TYPE_CHECKING:
    from ..summary import Summary


def run_inspect(src: str, **reading: Any) -> None:
    """Print the summary of a model."""
    check_model(src, **reading)
    from ..summary import summarize

    show(summarize(src, **reading), Console())


def run_page(
    src: str, target: Path, text: str | None, compare: str | None, force: bool = False, **reading: Any
) -> None:
    """Write the page of a model, whole or not at all."""
    check_model(src, **reading)
    if compare is not None:
        check_model(compare)
    check_page(target, force)
    if text is not None and not text.strip():
        raise ConversionError("--text is empty: write some words")
    if text is not None and not Path(src).is_dir() and Path(src).suffix == ".json":
        raise ConversionError(f"--text needs weights, and {src} is only a config: name the folder of a model")
    from blockformer.page.making import page_of

    write_text(target, page_of(src, text, compare, **reading))
    print(f"{target}: {format_size(target.stat().st_size)}, opens in any browser")


def check_page(target: Path, force: bool) -> None:
    """Check that a page may be written there.

    Raises:
        ConversionError: it may not.
    """
    if target.is_dir():
        raise ConversionError(f"{target}: a folder; name a file, such as {target / 'page.html'}")
    if not target.absolute().parent.is_dir():
        raise ConversionError(f"{target.parent}: no such folder; make it first")
    if os.path.lexists(target) and not force:
        raise ConversionError(f"{target}: already exists; name another file, or replace it with --force")


def show(summary: "Summary", console: Console) -> None:
    """Print a summary: title, settings by axis, layers, numbers, notes."""

    def line(text: str = "") -> None:
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    active = f", {summary.active:,} active per token" if summary.active != summary.parameters else ""
    line(f"{summary.name}: {summary.parameters:,} parameters{active}")
    line()
    table = Table(box=None, pad_edge=False, show_header=False)
    for axis, fields in summary.settings.items():
        for index, (field, value) in enumerate(fields.items()):
            table.add_row("" if index else axis, field, printable(str(value)))
    console.print(table, markup=False, highlight=False)
    line()
    line(summary.tree)
    line()
    for dtype, nbytes in summary.memory.items():
        line(f"weights in {dtype}: {nbytes:,} bytes ({format_size(nbytes)})")
    for dtype, nbytes in summary.cache.items():
        line(f"cache in {dtype}: {nbytes:,} bytes per token ({format_size(nbytes)})")
    for dtype, nbytes in summary.state.items():
        line(f"state in {dtype}: {nbytes:,} bytes per text of any length ({format_size(nbytes)})")
    if summary.sliding:
        layers, window = summary.config.num_hidden_layers, summary.config.sliding_window
        line(f"{summary.sliding} of {layers} layers keep only the last {window:,} tokens")
    for note in summary.notes:
        line(f"note: {note}")
