"""`blockformer convert` and `blockformer export`: a progress bar, and what was done.

Their arguments are checked before anything that takes seconds is imported.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from blockformer.conversion import ConversionError
from blockformer.conversion.arguments import FLAGS, OF_USES, USES, check_conversion, check_use

from ..files.errors import printable
from ..files.sizes import format_size

if TYPE_CHECKING:
    from blockformer.conversion import ConversionReport

QUIET_SECONDS = 5
"""The shortest pause between two lines of a log without a terminal."""
NOT_VERIFIED = 3
"""Exit status where a conversion was written and nothing could be compared."""
LAYOUTS = ("blockformer", "official")
CODES = ("litgpt", "torchtune", "torchtitan", "nanochat", "x-transformers")
"""Training code that models are written for."""
OF_CONVERT = {"to_official": "--to official", "config": "--config", "dequantize": "--dequantize"}
"""Options of a conversion that neither a new shape nor a repo for search has."""
FROM_WHERE = ("revision", "subfolder", "local_files_only")
"""Options of a source on the Hub."""


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that disappears when the work is done; without a terminal, a line now and then."""
    bar, amount = BarColumn(bar_width=10), TextColumn("{task.fields[amount]}")  # 80 columns have room for all
    columns = (TextColumn("{task.description}"), bar, amount, TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=None, amount="")
        start = said = began = time.monotonic()
        whole = 0

        def report_progress(step: str, done: int, total: int) -> None:
            nonlocal said, began, whole
            now = time.monotonic()
            if total != whole:  # work of another kind
                began, whole = now, total
            rest = f"{done / total:.0%}, {left(now - began, done / total)}" if total else ""
            progress.update(task, description=step, completed=done, total=total or None, amount=rest)
            if progress.disable and now - said > QUIET_SECONDS:
                said = now
                print(f"{now - start:.0f} s: {step} {rest}".rstrip(), file=sys.stderr, flush=True)

        yield report_progress


def left(seconds: float, share: float) -> str:
    """About how long the rest takes, after some seconds for this share."""
    if not (seconds and share):
        return "no estimate yet"
    rest = seconds * (1 - share) / share
    return f"~{rest:.0f} s left" if rest < 100 else f"~{rest / 60:.0f} min left"


def run_convert(
    src: str, dst: str, to: str, shape: dict[str, Any], verify: str | None, no_verify: bool, **options: Any
) -> None:
    """Convert and report; with a new shape if there is one."""
    if to not in (*LAYOUTS, *CODES):
        raise ConversionError(f"--to must be one of {', '.join((*LAYOUTS, *CODES))}, not '{to}'")
    if no_verify and verify not in (None, "none"):
        raise ConversionError(f"--no-verify and --verify {verify} contradict each other; use one of them")
    if to in CODES:
        _run_for_code(src, dst, to, {**shape, "verify": verify, "no_verify": no_verify or None, **options})
        return
    options["verify"] = "none" if no_verify else verify or "auto"
    options["to_official"] = to == "official"
    if shape and options["into"] is not None:
        raise ConversionError("--into cannot be combined with another shape or use; convert in two steps")
    if shape:
        options.pop("into")
    targets = ("decoder", "encoder", "encoder-decoder", *USES)
    if shape.get("topology", targets[0]) not in targets:
        raise ConversionError(f"--as must be one of {', '.join(targets)}, not '{shape['topology']}'")
    if shape.get("topology") in USES:
        _run_for_search(src, dst, shape, options)
        return
    if more := [name for name in shape if name in OF_USES]:
        flag = FLAGS[more[0]]
        raise ConversionError(f"{flag} is for --as {' or --as '.join(OF_USES[more[0]])}: add that, or leave {flag} out")
    if shape:
        _run_reshaped(src, dst, shape, options)
        return
    if options["family"] or options["config"] or not os.path.isfile(src):  # a file may be of training code
        check_conversion(src, dst, **options)
    from blockformer.conversion import convert

    with progress_bar() as report_progress:
        report = _of_own_code(src, dst, progress=report_progress, **options)
        if report is None:
            report = convert(src, dst, progress=report_progress, **options)
    layout = f"the official {report.family} layout" if report.to_official else "a self-contained repo"
    _show_compared(report, f"{report.source} -> {report.target}: {layout}")


def _of_own_code(src: str, dst: str, **options: Any) -> "ConversionReport | None":
    """The report of a conversion, where the source is a file or folder that may be of training code."""
    if not os.path.exists(src):
        return None
    from blockformer.doctor.reading_in import convert_own_code

    return convert_own_code(src, dst, **options)


def _run_for_code(src: str, dst: str, code: str, given: dict[str, Any]) -> None:
    """Write a model for training code and report."""
    force, reading = given.pop("force"), {name: given.pop(name, None) for name in FROM_WHERE}
    idle = {"max_shard_size": "5GB", "strict_finite": False}
    if more := [name for name, value in given.items() if value not in (None, idle.get(name))]:
        flag = FLAGS.get(more[0], f"--{more[0].replace('_', '-')}")
        raise ConversionError(f"{flag} cannot be combined with --to {code}; convert in two steps")
    from blockformer.doctor import write_for

    reading = {name: value for name, value in reading.items() if value}
    with progress_bar() as report_progress:
        said = write_for(src, dst, code, force=force, progress=report_progress, **reading)
    print(printable(f"{src} -> {dst}: a checkpoint for {code}"))
    for line in said:
        print(printable(line))


def _run_for_search(src: str, dst: str, given: dict[str, Any], options: dict[str, Any]) -> None:
    use = given.pop("topology")
    if shape := [FLAGS[name] for name in given if name not in OF_USES]:
        raise ConversionError(f"{', '.join(shape)} cannot be combined with --as {use}; convert in two steps")
    if "tokens" in given:
        given["tokens"] = given["tokens"].split(",")
    if "prompts" in given:
        given["prompts"] = dict(map(prompt_of, given["prompts"]))
    check_use(use, **given)
    _refuse_of_convert(f"--as {use}", options)
    check_conversion(src, dst, function="convert_for_search", **options)
    from blockformer.conversion.for_search import convert_for_search

    with progress_bar() as report_progress:
        report = convert_for_search(src, dst, use=use, progress=report_progress, **given, **options)
    what = f"a self-contained repo of a{'n' * (use == 'embedder')} {use}"
    _show_compared(report, f"{report.source} -> {report.target}: {what}")


def prompt_of(text: str) -> tuple[str, str]:
    """`query=Find: ` -> ("query", "Find: "); a backslash and n stand for a new line."""
    name, equals, prompt = text.partition("=")
    if not (name and equals and prompt):
        raise ConversionError(f"--prompt must be NAME=TEXT, such as 'query=Search: ', not {text!r}")
    return name, prompt.replace("\\n", "\n")


def _run_reshaped(src: str, dst: str, shape: dict[str, Any], options: dict[str, Any]) -> None:
    if "layers" in shape:
        shape["layers"] = layer_list(shape["layers"])
    _refuse_of_convert(f"{', '.join(FLAGS[each] for each in shape)}: a new shape", options)
    check_conversion(src, dst, function="convert_reshaped", shape=shape, **options)
    from blockformer.conversion.reshaped import NEEDS_TRAINING, convert_reshaped

    with progress_bar() as report_progress:
        report = convert_reshaped(src, dst, progress=report_progress, **shape, **options)
    what = "of another shape" if NEEDS_TRAINING in report.notes else "of the decoder that it was converted from"
    _show(report, f"{report.source} -> {report.target}: a self-contained repo {what}")


def _refuse_of_convert(what: str, options: dict[str, Any]) -> None:
    """Take the options of `OF_CONVERT` out, and refuse any that is set."""
    for name, flag in OF_CONVERT.items():
        if options.pop(name) not in (None, False):
            raise ConversionError(f"{what} cannot be combined with {flag}; convert in two steps")


def layer_list(text: str) -> list[int]:
    """`0,2,4-6` -> [0, 2, 4, 5, 6]."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 8:
            raise ConversionError(f"--layers must be a list such as 0,2,4 or 0-3,8-11, not {text!r}")
        layers += range(int(first), int(last or first) + 1)
    return layers


def run_export(src: str, dst: str, sign: str | None, **options: Any) -> None:
    """Export and report."""
    check_conversion(src, dst, function="export_folder", **options)
    from blockformer.conversion import export_folder

    with progress_bar() as report_progress:
        report = export_folder(src, dst, sign=sign, progress=report_progress, **options)
    _show(report, f"{report.source} -> {report.target}: a self-contained repo{', signed' if sign else ''}")


def _show(report: "ConversionReport", title: str) -> None:
    print(printable(title))
    dtypes = f", {', '.join(report.dtypes)}" if report.dtypes else ""
    print(f"{report.tensors} tensors, {format_size(report.nbytes)}{dtypes}, {report.seconds:.1f} s")
    for measured in report.parity.measured if report.parity else []:
        print(f"compared in {measured}")
    for note in report.notes:
        print(f"note: {printable(note)}")
    if not report.has_tokenizer:
        print("note: the source has no tokenizer, so the target has none")


def _show_compared(report: "ConversionReport", title: str) -> None:
    """The same for a target that may be compared with its source; ends with its own status if it could not be."""
    _show(report, title)
    if report.parity is None:
        print("not compared with the source (--no-verify)")
    if report.not_verified:
        raise SystemExit(NOT_VERIFIED)
