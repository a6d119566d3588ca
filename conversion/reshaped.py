"""Convert a checkpoint into a repo of another shape: fewer layers or heads, experts, another topology."""

import time
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.finite import nonfinite
from blockformer.files.front_matter import front_matter
from blockformer.files.generation_settings import FILE
from blockformer.files.new_repo import new_repo
from blockformer.files.side_files import carry_side_files, name_the_rest, refuse_adapters
from blockformer.files.sources import Source, locate
from blockformer.publishing import write_card
from blockformer.reshaping import check_changes, reshape

from .arguments import check_conversion
from .loading import load_source
from .options import OPTIONS, OWN, READING, OptionError
from .progress import Progress, silent
from .report import ConversionReport
from .writing import memory_errors, opened

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
    seed: int = 0,
    to_official: bool = False,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    dequantize: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool | str = "auto",
    force: bool = False,
    strict_finite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> ConversionReport:
    """Write a checkpoint, official or ours, as a self-contained repo of another shape. It needs training.

    The whole model is held in memory. Nothing is compared: the shape changes what is computed.

    Args:
        src: a folder or Hub id, in an official layout or ours.
        dst: the repo to create.
        topology, layers, kv_heads, experts, seed: see `blockformer.reshape`.
        family, dtype, max_shard_size, force, strict_finite, progress: see `convert`.
        to_official, config, dequantize, verify: see `convert`. A new shape leaves no room for them: they are refused,
            except with values that ask for nothing, such as `verify="auto"`.
        options: which files are read, and from where, see `convert`; and `changes` of `blockformer.reshape`.

    Raises:
        ConversionError: see `convert`; or the model has no such shape.
    """
    start = time.monotonic()
    report_progress = progress or silent
    shape: dict[str, Any] = {"topology": topology, "layers": layers, "kv_heads": kv_heads, "experts": experts}
    changes = {name: value for name, value in options.items() if name not in OPTIONS}
    reading = {name: value for name, value in options.items() if name in OPTIONS}
    try:
        check_changes(changes, "convert_reshaped", [*OWN["convert_reshaped"], *READING])
    except ValueError as error:
        raise OptionError(str(error)) from error
    check_conversion(
        src,
        dst,
        function="convert_reshaped",
        to_official=to_official,
        family=family,
        config=config,
        dtype=dtype,
        dequantize=dequantize,
        max_shard_size=max_shard_size,
        verify=verify,
        force=force,
        strict_finite=strict_finite,
        shape={name: value for name, value in shape.items() if value is not None},
        **reading,
    )
    place = locate(src, **reading)
    refuse_adapters(place.path)
    report_progress("loading the model", 0, 0)
    with memory_errors(), opened(place) as (checkpoint, notes):
        model, said = _loaded(place, family, dtype)
        notes += [note for note in said if note not in notes]
        report_progress("changing its shape", 0, 0)
        try:
            reshaped = reshape(model, seed=seed, **shape, **changes)
        except ValueError as error:
            raise ConversionError(str(error)) from error
        notes += _values(reshaped, place.title(src), strict_finite)
        report = ConversionReport(place.title(src), Path(dst), "", False, notes=notes)
        report.tensors, report.dtypes = len(reshaped.state_dict()), [str(reshaped.dtype).removeprefix("torch.")]
        report.nbytes = sum(parameter.numel() * parameter.element_size() for parameter in reshaped.parameters())
        with new_repo(dst, force=force, sources=place.files, check_sources=checkpoint.check_unchanged) as temporary:
            report_progress("writing", 0, 0)
            reshaped.save_pretrained(temporary, max_shard_size=max_shard_size)
            if FILE in place.names:
                (temporary / FILE).unlink(missing_ok=True)  # the source's own is carried
            side = carry_side_files(checkpoint, place.names, temporary)
            name_the_rest(checkpoint, place.names, temporary, side)
            report.notes += [*side.notes, *side.lines]
            report.left_out = side.left_out
            done, name = what_was_done(shape), place.hub_id or (place.around or place.path).name
            write_card(
                temporary,
                reshaped.config,
                origin=f"Made of `{name}`: Blockformer {done}. **The model needs training.**",
                base_model=place.hub_id,
                front=front_matter(checkpoint),
                parity="Not compared: the shape changes what is computed.",
                parameters=reshaped.num_parameters(),
            )
    report.notes.append("the model needs training")
    report.seconds = time.monotonic() - start
    return report


def _loaded(place: Source, family: str | None, dtype: Any) -> tuple[PreTrainedModel, list[str]]:
    """The model of a source, and what loading it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = load_source(place, family, dtype)
    return model, [str(each.message).removeprefix(f"{place.path}: ") for each in caught]


def _values(model: PreTrainedModel, source: str, strict_finite: bool) -> list[str]:
    """A note on NaN and infinite weights.

    Raises:
        ConversionError: there are some, and `strict_finite` refuses them.
    """
    counts = {name: nonfinite(tensor) for name, tensor in model.state_dict().items()}
    bad = [f"{shown(name)}: {count} of {model.state_dict()[name].numel()}" for name, count in counts.items() if count]
    if bad and strict_finite:
        raise ConversionError(f"{source}: NaN or infinite values:{listed(bad)}")
    return [f"NaN or infinite values (kept as they are):{listed(bad)}"] if bad else []


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
