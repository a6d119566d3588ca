"""Turn a folder in our layout into a self-contained repo."""

import os
import shutil
import time
from os import PathLike
from pathlib import Path

from blockformer.publishing import copy_code, full_auto_map, signing, write_card

from .arguments import check_conversion
from .errors import ConversionError, shown
from .files.front_matter import front_matter
from .files.json_files import json_text, read_json
from .files.new_repo import new_repo
from .files.repo import memory_errors, opened, write_generation_config, write_weights
from .files.side_files import carry_side_files, copy_store, refuse_adapters
from .files.sources import locate
from .files.unused_tensors import UNUSED_FILE
from .model_tensors import by_sources, expected_tensors, identity_rules, reading, stored_pairs, unread_pooler
from .origin import ORIGIN
from .plan import (
    architecture_of,
    bytes_by_dtype,
    is_ours,
    our_config,
)
from .progress import Progress, silent
from .report import ConversionReport
from .rules.table import check_tied


def export_folder(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    strict_finite: bool = False,
    revision: str | None = None,
    sign: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Turn a folder in our layout (a `Trainer` checkpoint, say) into a self-contained repo, tensor by tensor.

    Args:
        src: a folder or Hub id.
        dst: the repo to create.
        max_shard_size: largest size of one weight file, such as "5GB".
        force: replace a folder that Blockformer made, if nobody changed it.
        strict_finite: refuse NaN and infinite weights instead of reporting them.
        revision: of a Hub id, a branch, tag or commit.
        sign: a private key (PEM) to sign the repo with; see `blockformer.publishing.signing.sign`.
        progress: receives progress reports.

    Raises:
        ConversionError: see `convert`.
    """
    import blockformer

    start = time.monotonic()
    report_progress = progress or silent
    check_conversion(src, dst, max_shard_size=max_shard_size, force=force, revision=revision)
    if sign is not None:
        signing.check_key(sign)
    place = locate(src, revision=revision)
    folder, hub_id = place.path, place.hub_id
    refuse_adapters(folder)
    with memory_errors(), opened(place) as (checkpoint, notes):
        if not is_ours(checkpoint.config):
            raise ConversionError(f"{folder}: not a model of Blockformer; `blockformer convert` makes a repo of it")
        config = our_config(checkpoint.config)
        architecture = architecture_of(config)
        if architecture not in {target.rpartition(".")[2] for target in full_auto_map(config).values()}:
            raise ConversionError(
                f"{folder}: config.json: architectures names {shown(architecture)}, which is not one of our classes"
            )
        model_class = getattr(blockformer, architecture)
        shapes, tied, parameters = expected_tensors(model_class, config)
        pooler = unread_pooler(model_class, config)
        shapes |= pooler
        names = by_sources(checkpoint.tensors, tied)
        headers = {name: checkpoint.tensors[own] for name, own in names.items()}
        groups = reading(identity_rules(shapes).plan(headers, shapes, optional=[*tied, *pooler]), names)
        report = ConversionReport(hub_id or os.fspath(src), Path(dst), "", False, notes=notes)
        sizes = bytes_by_dtype(groups)
        report.tensors, report.nbytes = len(groups), sum(sizes.values())
        report.dtypes = [str(kind).removeprefix("torch.") for kind in sizes]
        with new_repo(dst, force=force, sources=[folder], check_sources=checkpoint.check_unchanged) as temporary:
            check_tied(lambda name: checkpoint.read(names[name]), stored_pairs(tied, groups))
            report.notes += write_weights(checkpoint, groups, temporary, max_shard_size, strict_finite, report_progress)
            (temporary / "config.json").write_text(config.to_json_string(), encoding="utf-8")
            side = carry_side_files(checkpoint, place.names, temporary)
            report.notes += side.notes
            copy_code(temporary, config)
            write_generation_config(checkpoint, temporary, checkpoint.config, config)
            if os.path.lexists(folder / ORIGIN):
                text = json_text(read_json(checkpoint.member(ORIGIN)))
                (temporary / ORIGIN).write_text(text, encoding="utf-8")
                copy_store(checkpoint, place.names, temporary)
                if os.path.lexists(folder / UNUSED_FILE):
                    (temporary / UNUSED_FILE).parent.mkdir(exist_ok=True)
                    shutil.copyfile(checkpoint.member(UNUSED_FILE), temporary / UNUSED_FILE)
            write_card(temporary, config, parameters=parameters, front=front_matter(checkpoint))
            if sign is not None:
                signing.sign(temporary, sign)
    report.seconds = time.monotonic() - start
    return report
