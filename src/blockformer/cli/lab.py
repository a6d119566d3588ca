"""`blockformer lab`: an experiment from its file to its table."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockformer.files.errors import ConversionError

if TYPE_CHECKING:
    from rich.console import Console

    from blockformer.lab.experiment import Experiment, Run


def lab(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.yaml", help="What to compare, on what, for how long.")
    ],
    output: Annotated[Path | None, typer.Option(help="The folder of the runs; by default named like the file.")] = None,
    shard: Annotated[str | None, typer.Option(metavar="K/N", help="Only every N-th run, from the K-th on.")] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Train each config at each of these hidden sizes, such as 64,128,256, and fit a power law.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file and show the runs; train nothing.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Train nothing: report the runs that are finished.")] = False,
) -> None:
    """Train configs that differ in one setting or in several, and compare them: equal sizes, several seeds.

    Finished runs are never repeated: run it again after a kill, or with more seeds or configs in the file.
    """
    part, parts = _shard(shard)
    ladder = _widths(widths)
    if report and (dry_run or shard):
        other = "--dry-run" if dry_run else "--shard"
        raise typer.BadParameter(f"--report trains nothing: leave out {other} or --report")
    if not experiment.is_file():
        raise ConversionError(f"{experiment}: no such file")
    from accelerate import PartialState
    from rich.console import Console
    from transformers.utils import logging

    from blockformer.lab.experiment_file import read_experiment
    from blockformer.lab.report import TABLE, write_report

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = output or Path(experiment.stem)
    found = read_experiment(experiment)
    runs = found.runs(ladder)
    is_main = PartialState().is_main_process
    console = Console(quiet=not is_main)
    show(found, runs, console)
    if dry_run:
        return
    if not report:
        _train(found, runs[part - 1 :: parts], folder, parts > 1)
    if is_main:
        groups = write_report(folder, runs, experiment.stem)
        for line in (folder / TABLE).read_text(encoding="utf-8").splitlines()[: len(groups) + 2]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _shard(text: str | None) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text or "1/1")
    part, parts = (int(number) for number in match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise typer.BadParameter(f"--shard must be like 3/8 (the third of eight), not {text!r}")
    return part, parts


def _widths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    if not re.fullmatch(r"\d+(,\d+)+", text) or not all(map(int, text.split(","))):
        raise typer.BadParameter(f"--widths must list two or more sizes, like 64,128,256, not {text!r}")
    return tuple(sorted(set(map(int, text.split(",")))))


def show(experiment: "Experiment", runs: "list[Run]", console: "Console") -> None:
    """Print the configs and their sizes, before anything is trained."""
    from rich.table import Table

    table = Table("config", "parameters", "FLOPs per token", "inner width", box=None, pad_edge=False)
    for run in {run.group: run for run in runs}.values():
        inner = run.config.moe_intermediate_size if run.config.num_experts else run.config.intermediate_size
        table.add_row(run.group, f"{run.parameters:,}", f"{run.flops_per_token:,.0f}", f"{inner:,}")
    kind, amount = experiment.budget
    console.print(table, markup=False, highlight=False)
    console.print(
        f"{len(runs)} runs ({len(experiment.seeds)} seeds) with equal {experiment.equal}, "
        f"each of {amount:,.12g} {kind.replace('_', ' ')}",
        markup=False,
        highlight=False,
    )


def _train(experiment: "Experiment", runs: "list[Run]", folder: Path, is_sharded: bool) -> None:
    from accelerate import PartialState

    from blockformer.lab.runs import open_folder, run_all
    from blockformer.lab.text import Text

    from .checkpoints import progress_bar

    text, process, done = Text(experiment.data), PartialState(), 0
    with process.main_process_first():  # the others find it made
        open_folder(folder, experiment, text)
    with progress_bar() as tell:

        def told(run: "Run", news: str, share: float) -> None:
            nonlocal done
            if process.is_main_process:
                tell(f"{run.name}{f' ({news})' if news else ''}", round(1000 * (done + share)), 1000 * len(runs))
            done += share == 1.0 and bool(news)

        elsewhere = run_all(experiment, runs, folder, text, is_sharded, told)
    if elsewhere and process.is_main_process:
        print(f"other processes are working on {len(elsewhere)} of these runs: {', '.join(elsewhere)}", file=sys.stderr)
