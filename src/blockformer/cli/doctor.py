"""`blockformer doctor`: what is wrong with a checkpoint, on one screen or as JSON, and a mended one."""

import json
from typing import Any

from blockformer.conversion import ConversionError

from ..files.errors import printable


def run_doctor(
    source: str,
    against: str | None,
    target: str | None,
    as_json: bool,
    quick: bool,
    settings: list[str],
    force: bool,
    max_shard_size: str,
    choices: dict[str, Any],
    **reading: Any,
) -> None:
    """Diagnose, mend if asked to, and report; ends with the status of the diagnosis, or 0 after mending."""
    from blockformer.doctor import Options, diagnose, mend
    from blockformer.doctor.options import settings_from
    from blockformer.doctor.report import lines_of

    from .checkpoints import progress_bar

    options = Options(settings=settings_from(settings), **choices)
    if target is None and force:
        raise ConversionError("--force needs --mend: it replaces the folder that --mend writes")
    with progress_bar() as report_progress:
        if target is None:
            found = diagnose(source, against, options=options, quick=quick, progress=report_progress, **reading)
        else:
            how: dict[str, Any] = {"force": force, "max_shard_size": max_shard_size, "progress": report_progress}
            found = mend(source, target, against, options=options, **how, **reading)
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        for line in lines_of(found, target):
            print(printable(line))
    if target is None and found.status:
        raise SystemExit(found.status)
