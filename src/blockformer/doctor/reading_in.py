"""Checkpoints of training code as sources of `blockformer convert`: the official model that computes the same first."""

import os
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

from blockformer.conversion import ConversionError, convert, export_folder
from blockformer.conversion.report import ConversionReport
from blockformer.files.config_file import is_ours, read_config
from blockformer.files.names import WEIGHT_FILES, has_weights

from .diagnosing import examined
from .mending import mend
from .options import Options

OF_OTHER_SOURCES = ("to_official", "family", "config", "dequantize", "revision", "subfolder", "variant")
"""Options of `convert` that training code's checkpoints have nothing for."""


def convert_own_code(src: str | PathLike[str], dst: str | PathLike[str], **options: Any) -> ConversionReport | None:
    """Convert a checkpoint of training code into a self-contained repo.

    Its official layout is written next to the target, converted and compared as `convert` does, and removed.

    Args:
        src: a folder, or a file with weights.
        dst: the folder to create.
        options: as for `convert`.

    Returns:
        The report; None if the source is not from training code that we know, and then nothing has been done.

    Raises:
        ConversionError: see `mend` and `convert`.
    """
    path = Path(src)
    if any(options.get(name) for name in OF_OTHER_SOURCES) or not _may_be(path):
        return None
    dtype = options.pop("dtype", None)
    try:
        with examined(path, None, Options()) as (found, _):
            if found.code is None:
                return None
            name = found.code.name
    except ConversionError:
        return None
    parent = Path(os.path.abspath(dst)).parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".own-code-", dir=parent) as folder:
        between = Path(folder) / (path.parent.name if path.suffix and path.is_file() else path.name or "checkpoint")
        mend(path, between, options=Options(dtype=dtype), progress=options.get("progress"))
        entries = read_config(between / "config.json")
        if is_ours(entries):
            shared = ("max_shard_size", "force", "strict_finite", "progress")
            report = export_folder(between, dst, **{each: options[each] for each in shared if each in options})
        else:
            report = convert(between, dst, **options)
    report.source = os.fspath(src)
    report.notes.insert(0, f"a checkpoint of {name}, read as {entries['architectures'][0]}")
    return report


def _may_be(path: Path) -> bool:
    """Whether a path is a local file with weights, or a folder without any under a name that libraries look for."""
    if path.is_dir():
        return not has_weights(path)
    return path.is_file() and path.suffix in WEIGHT_FILES
