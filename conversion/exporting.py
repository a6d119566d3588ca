"""Turn a folder in our layout into a self-contained repo."""

import os
import shutil
import time
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockformer.files.config_file import is_ours
from blockformer.files.errors import ConversionError
from blockformer.files.front_matter import front_matter
from blockformer.files.json_files import json_text, read_json
from blockformer.files.new_repo import new_repo
from blockformer.files.quantized import refuse_quantized
from blockformer.files.side_file_kinds import copy_store
from blockformer.files.side_files import carry_side_files, name_the_rest, refuse_adapters
from blockformer.files.sources import Reading, locate
from blockformer.model_classes import MODELS
from blockformer.publishing import copy_code, signing, write_card
from blockformer.publishing.repo_code import release_code

from .arguments import check_conversion
from .into_memory import dtype_note, dtype_of_file
from .model_tensors import by_sources, expected_tensors, identity_rules, stored_pairs, unread_pooler, with_sources
from .origin import ORIGIN
from .plan import (
    architecture_of,
    bytes_by_dtype,
    our_config,
)
from .progress import Progress, silent
from .report import ConversionReport
from .rules.table import check_tied
from .storage.unused_tensors import UNUSED_FILE
from .writing import memory_errors, opened, write_generation_config, write_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack


def export_folder(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    strict_finite: bool = False,
    sign: str | PathLike[str] | None = None,
    progress: Progress | None = None,
    **reading: "Unpack[Reading]",
) -> ConversionReport:
    """Turn a folder in our layout (a `Trainer` checkpoint, say) into a self-contained repo, tensor by tensor.

    Args:
        src: a folder or Hub id.
        dst: the repo to create.
        max_shard_size: largest size of one weight file, such as "5GB".
        force: replace a folder that Blockformer made, if nobody changed it.
        strict_finite: refuse NaN and infinite weights instead of reporting them.
        sign: a private key (PEM) to sign the repo with; see `blockformer.publishing.signing.sign`.
        progress: receives progress reports.
        reading: which files are read, and from where; see `convert`.

    Raises:
        ConversionError: see `convert`.
    """
    start = time.monotonic()
    report_progress = progress or silent
    own: dict[str, Any] = {"max_shard_size": max_shard_size, "force": force, "strict_finite": strict_finite}
    check_conversion(src, dst, function="export_folder", **own, **reading)
    if sign is not None:
        signing.check_key(sign)
    place = locate(src, **reading)
    folder = place.path
    refuse_adapters(folder)
    with memory_errors(), opened(place) as (checkpoint, notes):
        if not is_ours(checkpoint.config):
            raise ConversionError(f"{folder}: not a model of Blockformer; `blockformer convert` makes a repo of it")
        refuse_quantized(checkpoint.config, checkpoint.tensors)
        config = our_config(checkpoint.config)
        model_class = MODELS[architecture_of(config)]
        shapes, tied, parameters = expected_tensors(model_class, config)
        pooler = unread_pooler(model_class, config)
        shapes |= pooler
        names = by_sources(checkpoint.tensors, tied)
        headers = {name: checkpoint.tensors[own] for name, own in names.items()}
        groups = with_sources(identity_rules(shapes).plan(headers, shapes, optional=[*tied, *pooler]), names)
        notes += dtype_note(config, dtype_of_file(checkpoint))
        report = ConversionReport(place.title(src), Path(dst), "", False, notes=notes)
        sizes = bytes_by_dtype(groups)
        report.tensors, report.nbytes = len(groups), sum(sizes.values())
        report.dtypes = [str(kind).removeprefix("torch.") for kind in sizes]
        with new_repo(dst, force=force, sources=place.files, check_sources=checkpoint.check_unchanged) as temporary:
            check_tied(lambda name: checkpoint.parts(names[name]), stored_pairs(tied, groups))
            report.notes += write_weights(checkpoint, groups, temporary, max_shard_size, strict_finite, report_progress)
            (temporary / "config.json").write_text(config.to_json_string(), encoding="utf-8")
            side = carry_side_files(checkpoint, place.names, temporary)
            copy_code(temporary, config)
            for name, path in release_code(folder, config).items():
                if not (temporary / name).exists():  # code that not every repo has
                    (temporary / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, temporary / name)
            write_generation_config(checkpoint, temporary, checkpoint.config, config)
            if os.path.lexists(folder / ORIGIN):
                text = json_text(read_json(checkpoint.member(ORIGIN)))
                (temporary / ORIGIN).write_text(text, encoding="utf-8")
                copy_store(checkpoint, place.names, temporary)
                if os.path.lexists(folder / UNUSED_FILE):
                    (temporary / UNUSED_FILE).parent.mkdir(exist_ok=True)
                    shutil.copyfile(checkpoint.member(UNUSED_FILE), temporary / UNUSED_FILE)
            name_the_rest(checkpoint, place.names, temporary, side, [ORIGIN] if (temporary / ORIGIN).exists() else [])
            report.notes += [*side.notes, *side.lines]
            report.left_out = side.left_out
            write_card(temporary, config, parameters=parameters, front=front_matter(checkpoint))
            if sign is not None:
                signing.sign(temporary, sign)
    report.seconds = time.monotonic() - start
    return report
