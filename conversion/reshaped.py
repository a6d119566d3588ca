"""Convert a checkpoint into a repo of another shape: fewer layers or heads, experts, another topology."""

import os
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from blockformer.publishing import write_card
from blockformer.reshaping import reshape

from .arguments import check_conversion
from .errors import ConversionError
from .files.front_matter import front_matter
from .files.generation_settings import FILE
from .files.new_repo import new_repo
from .files.repo import memory_errors, opened
from .files.side_files import carry_side_files, name_the_rest, refuse_adapters
from .files.sources import locate
from .loading import load_folder
from .progress import Progress, silent
from .report import ConversionReport

WORDS = {
    "topology": "made {} of it",
    "layers": "kept its layers {}",
    "kv_heads": "replaced its key and value heads by {} means of groups of them",
    "experts": "copied each feed-forward network into {} experts",
}


def convert_reshaped(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    topology: str | None = None,
    layers: Sequence[int] | None = None,
    kv_heads: int | None = None,
    experts: int | None = None,
    family: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> ConversionReport:
    """Write a checkpoint, official or ours, as a self-contained repo of another shape. It needs training.

    The whole model is held in memory. Nothing is compared: the shape changes what is computed.

    Args:
        src: a folder or Hub id, in an official layout or ours.
        dst: the repo to create.
        topology, layers, kv_heads, experts, changes: see `blockformer.reshape`.
        family, dtype, max_shard_size, force, revision, progress: see `convert`.

    Raises:
        ConversionError: see `convert`; or the model has no such shape.
    """
    start = time.monotonic()
    report_progress = progress or silent
    check_conversion(
        src, dst, family=family, dtype=dtype, max_shard_size=max_shard_size, force=force, revision=revision
    )
    shape: dict[str, Any] = {"topology": topology, "layers": layers, "kv_heads": kv_heads, "experts": experts}
    place = locate(src, revision=revision)
    folder, hub_id = place.path, place.hub_id
    refuse_adapters(folder)
    report_progress("loading the model", 0, 0)
    with memory_errors(), opened(place) as (checkpoint, notes):
        model = load_folder(folder, checkpoint.config, family, dtype)
        report_progress("changing its shape", 0, 0)
        try:
            reshaped = reshape(model, **shape, **changes)
        except ValueError as error:
            raise ConversionError(str(error)) from error
        report = ConversionReport(hub_id or os.fspath(src), Path(dst), "", False, notes=notes)
        report.tensors, report.dtypes = len(reshaped.state_dict()), [str(reshaped.dtype).removeprefix("torch.")]
        report.nbytes = sum(parameter.numel() * parameter.element_size() for parameter in reshaped.parameters())
        with new_repo(dst, force=force, sources=[folder], check_sources=checkpoint.check_unchanged) as temporary:
            report_progress("writing", 0, 0)
            reshaped.save_pretrained(temporary, max_shard_size=max_shard_size)
            if FILE in place.names:
                (temporary / FILE).unlink(missing_ok=True)  # the source's own is carried
            side = carry_side_files(checkpoint, place.names, temporary)
            name_the_rest(checkpoint, place.names, temporary, side)
            report.notes += [*side.notes, *side.lines]
            report.left_out = side.left_out
            done = what_was_done(shape)
            write_card(
                temporary,
                reshaped.config,
                origin=f"Made of `{hub_id or folder.name}`: Blockformer {done}. **The model needs training.**",
                base_model=hub_id,
                front=front_matter(checkpoint),
                parity="Not compared: the shape changes what is computed.",
                parameters=reshaped.num_parameters(),
            )
    report.notes.append("the model needs training")
    report.seconds = time.monotonic() - start
    return report


def what_was_done(shape: Mapping[str, Any]) -> str:
    """The changes of `reshape` in words."""
    articles = {"decoder": "a decoder", "encoder": "an encoder", "encoder-decoder": "an encoder-decoder"}
    said = []
    for name, words in WORDS.items():
        value = shape[name]
        if value is not None:
            text = articles.get(value, value) if name == "topology" else value
            said.append(words.format(", ".join(map(str, text)) if name == "layers" else text))
    return " and ".join(said)
