"""Convert a checkpoint into a repo of another shape: fewer layers or heads, experts, another topology."""

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from blockformer.files.config_file import is_ours
from blockformer.files.errors import ConversionError
from blockformer.files.progress import Progress
from blockformer.files.quantized import refuse_quantized
from blockformer.files.sources import Source
from blockformer.publishing.repo_code import release_code
from blockformer.publishing.write_repo import ModelWeights, write_repo
from blockformer.reshaping import check_changes, reshape

from .arguments import check_conversion
from .converting import from_official
from .options import OPTIONS, OWN, READING, OptionError
from .report import ConversionReport
from .undoing import can_be_undone, undo
from .writing import AroundWeights

NEEDS_TRAINING = "the model needs training"
WORDS = {
    "topology": "turned it into {}",
    "layers": "took only its layers {}",
    "kv_heads": "averaged groups of its key and value heads into {}",
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
    seed: int = 0,
    family: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool | str = "auto",
    force: bool = False,
    strict_finite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> ConversionReport:
    """Write a checkpoint, official or ours, as a self-contained repo of another shape. It needs training.

    The whole model is held in memory. Nothing is compared: the shape changes what is computed. A repo that
    `convert_for_search` made goes back to its decoder with `topology="decoder"`, bit for bit.

    Args:
        src: a folder or Hub id, in an official layout or ours.
        dst: the repo to create.
        topology, layers, kv_heads, experts, seed: see `blockformer.reshape`.
        family, dtype, max_shard_size, force, strict_finite, progress: see `convert`.
        verify: "auto" or "none" (False): nothing can be compared.
        options: which files are read, and from where, see `convert`; and `changes` of `blockformer.reshape`.

    Raises:
        ConversionError: see `convert`; or the model has no such shape.
    """
    shape: dict[str, Any] = {"topology": topology, "layers": layers, "kv_heads": kv_heads, "experts": experts}
    changes = {name: value for name, value in options.items() if name not in OPTIONS}
    reading = {name: value for name, value in options.items() if name in OPTIONS}
    try:
        check_changes(changes, "convert_reshaped", [*OWN["convert_reshaped"], *READING])
    except ValueError as error:
        raise OptionError(str(error)) from error
    written = check_conversion(
        src,
        dst,
        function="convert_reshaped",
        family=family,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=verify,
        force=force,
        strict_finite=strict_finite,
        progress=progress,
        shape={name: value for name, value in shape.items() if value is not None},
        **reading,
    )
    with AroundWeights.opened(src, dst, written, **reading) as around:
        checkpoint, place, report = around.checkpoint, around.place, around.report
        if is_ours(checkpoint.config):
            refuse_quantized(checkpoint.config, checkpoint.tensors)
        if can_be_undone(place) and topology == "decoder" and not changes and _is_only(shape, "topology"):
            undo(around, written)
            return report
        written.progress("loading the model", 0, 0)
        model, said = _loaded(place, family, dtype)
        report.notes += [note for note in said if note not in report.notes]
        written.progress("changing its shape", 0, 0)
        try:
            reshaped = reshape(model, seed=seed, **shape, **changes)
        except ValueError as error:
            raise ConversionError(str(error)) from error

        def fill(folder: Path) -> None:
            side = around.fill(folder, reshaped.config, release_code(place.path, reshaped.config))
            around.compare_tokenizers(side)
            around.write_card(
                folder,
                reshaped.config,
                reshaped.num_parameters(),
                origin=f"Made from `{place.name}`: Blockformer {what_was_done(shape)}. **The model needs training.**",
                parity="Not compared: the shape changes what is computed.",
            )

        weights = ModelWeights(reshaped, report.source, place.files, checkpoint.check_unchanged)
        write_repo(weights, written, fill, report)
    report.notes.append(NEEDS_TRAINING)
    return report


def _is_only(shape: Mapping[str, Any], name: str) -> bool:
    return all(value is None for other, value in shape.items() if other != name)


def _loaded(place: Source, family: str | None, dtype: Any) -> tuple[PreTrainedModel, list[str]]:
    """The model of a source, and what loading it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = from_official(place.path, dtype, family, **place.loading)
    return model, [str(each.message).removeprefix(f"{place.path}: ") for each in caught]


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
