"""`blockformer inspect`: a model on paper."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from blockformer.conversion.arguments import check_model

from .checkpoints import size

if TYPE_CHECKING:
    from blockformer.conversion.summary import Summary


def run_inspect(src: str, revision: str | None = None) -> None:
    """Print the summary of a model."""
    check_model(src, revision)
    from blockformer.conversion.summary import summarize

    show(summarize(src, revision), Console())


def show(summary: "Summary", console: Console) -> None:
    """Print a summary: title, settings by axis, layers, numbers, notes."""

    def line(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    active = f", {summary.active:,} of them active for a token" if summary.active != summary.parameters else ""
    line(f"{summary.name}: {summary.parameters:,} parameters{active}")
    line()
    table = Table(box=None, pad_edge=False, show_header=False)
    for axis, fields in summary.settings.items():
        for index, (field, value) in enumerate(fields.items()):
            table.add_row("" if index else axis, field, str(value))
    console.print(table, markup=False, highlight=False)
    line()
    line(summary.tree)
    line()
    for dtype, nbytes in summary.memory.items():
        line(f"weights in {dtype}: {nbytes:,} bytes ({size(nbytes)})")
    for dtype, nbytes in summary.cache.items():
        line(f"cache in {dtype}: {nbytes:,} bytes a token ({size(nbytes)})")
    if summary.sliding:
        layers, window = summary.config.num_hidden_layers, summary.config.sliding_window
        line(f"{summary.sliding} of {layers} layers keep the last {window:,} tokens only")
    for note in summary.notes:
        line(f"note: {note}")
