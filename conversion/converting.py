"""Convert a checkpoint, either way: plan from the headers, write tensor by tensor, verify, publish in one step."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from transformers import PreTrainedModel

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import is_ours, read_config
from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.finite import nonfinite
from blockformer.files.generation_settings import as_loaded, check_settings, settings_in
from blockformer.files.model_place import put_into_its_folder
from blockformer.files.progress import Progress
from blockformer.files.returning import return_side_files
from blockformer.files.side_files import SideFiles
from blockformer.files.sources import Reading, Source, locate
from blockformer.publishing.repo_code import release_code
from blockformer.publishing.write_repo import write_repo

from .arguments import check_conversion, check_source, is_quick, verification
from .composite import TextCheckpoint, opened
from .into import IntoComposite, composite, plan_into
from .into_memory import asked_dtype, dtype_note, load, load_ours, named, with_fields
from .official import lacks_pooler, official_loader, rounded
from .offload import check_device_map, removed_on_failure, written_weights
from .options import sorted_options
from .origin import ORIGIN
from .other_entries import note_on_unused
from .plan import Plan, parse_dtype, plan_out
from .remedies import plan_or_refer
from .report import ConversionReport
from .rules.groups import targets_of
from .sentence_options import translated
from .storage.awq import low_bit_weights
from .storage.unused_tensors import UNUSED_FILE, write_unused
from .verify import Parity, load_model
from .verify import verify as verify_models
from .writing import AroundWeights, CheckpointWeights, check_tied_targets

if TYPE_CHECKING:
    from typing_extensions import Unpack


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    to_official: bool = False,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
    into: str | PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    dequantize: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool | str = "auto",
    force: bool = False,
    strict_finite: bool = False,
    progress: Progress | None = None,
    **reading: "Unpack[Reading]",
) -> ConversionReport:
    """Convert a checkpoint into a new folder, which appears complete or not at all.

    Peak memory is the largest group of tensors that are changed together, as they are read and as they are made, plus
    a constant; what is only renamed, cast or compared goes by in parts of 1 MiB. `verify` adds one whole model at a
    time if it fits, or two small ones.

    Args:
        src: a folder or Hub id, in an official layout (with `to_official`, in ours); or a weight file, with `config`.
        dst: the folder to create. In our layout it is a self-contained `trust_remote_code` repo.
        to_official: convert from our layout back to the official one.
        family: the official family; None reads it from `model_type` or, on the way back, from the settings. A weight
            file requires it.
        config: the JSON file with the settings of a weight file.
        into: with `to_official`, for a text model that was taken from a checkpoint with other towers: the folder of
            that checkpoint, of which `dst` becomes a copy with this text in it, everything else byte for byte.
        dtype: cast the weights to "float32", "bfloat16" or "float16"; None keeps each tensor's own.
        dequantize: write plain weights of this dtype for a 4-bit checkpoint; None keeps the 4 bits.
        max_shard_size: largest size of one weight file, such as "5GB".
        verify: run both models on the same input and fail if they differ: "full" (True) on several texts, writing some
            too, "quick" on one text in one dtype, "none" (False) not at all. "auto" is full up to half a billion
            parameters, then quick.
        force: replace a folder that Blockformer made, if nobody changed it.
        strict_finite: refuse NaN and infinite weights instead of reporting them.
        progress: receives progress reports.
        reading: which files are read, and from where: `revision`, `token`, `cache_dir`, `subfolder`, `variant`,
            `use_safetensors`, `local_files_only`, `force_download`, as `from_pretrained` takes them.

    Returns:
        What was written, and how its outputs compare with the source's.

    Raises:
        ConversionError: the source cannot be converted, or the target cannot be made. Nothing is left behind then.
    """
    options = check_conversion(
        src,
        dst,
        to_official=to_official,
        family=family,
        config=config,
        into=into,
        dtype=dtype,
        dequantize=dequantize,
        max_shard_size=max_shard_size,
        force=force,
        strict_finite=strict_finite,
        progress=progress,
        verify=verify,
        **reading,
    )
    cast = parse_dtype(dtype if dequantize is None else dequantize)
    with AroundWeights.opened(src, dst, options, config, **reading) as around, composite(into) as text:
        checkpoint, place, report = around.checkpoint, around.place, around.report
        if to_official:
            plan = plan_out(checkpoint, family, cast)
            if text is None and not plan.family.names.has_own_layout:
                raise ConversionError(
                    f"{src}: no official class has the text of a '{plan.family.name}' without its vision tower; name "
                    "the repo that it came from as into (--into)"
                )
            plan = plan if text is None else plan_into(plan, checkpoint, text)
        else:
            plan = plan_or_refer(checkpoint, family, cast, dequantize is not None)
        report.family, report.to_official = plan.family.name, to_official
        report.notes += [
            *([] if to_official else _notes_on(checkpoint.config, plan)),
            *plan.notes,
            *dtype_note(plan.target_config, plan.dtype),
        ]
        if lacks_pooler(plan):
            name = plan.target_class.__name__
            report.notes.append(f"{name} has no pooler: the weights of this one are written, and it does not read them")
        weights = CheckpointWeights(checkpoint, plan.groups, plan.tied, place.files)
        if text is not None:
            weights = into_text = IntoComposite(checkpoint, plan, text, place.files)
            report.notes += into_text.notes

        def fill(folder: Path) -> None:
            side = None
            if to_official and text is None:
                side = _fill_official(plan, around, folder)
            elif not to_official:
                record, changed = recorder(plan, checkpoint, folder), partial(translated, plan, checkpoint)
                side = around.fill(folder, plan.target_config, plan.family.extra_code, record=record, changed=changed)
            if verification(verify) != "none":
                _compare(plan, around, side, folder, options.progress, is_quick(verify, plan.parameters))
            if text is None and (inner := plan.files.get("inner")):
                put_into_its_folder(folder, inner, plan.files.get("around", ()))
            if not to_official:
                _write_card(folder, plan, around)

        write_repo(weights, options, fill, report)
    return report


def _fill_official(plan: Plan, around: AroundWeights, folder: Path) -> SideFiles:
    """Write the settings of an official checkpoint, and what it holds next to its weights."""
    (folder / "config.json").write_text(plan.config_json, encoding="utf-8")
    unmissed = {*release_code(around.checkpoint.folder, plan.source_config), *([ORIGIN] if plan.files else [])}
    if any(not group.sources for group in plan.groups):  # the tensors that no model uses are written
        unmissed |= {UNUSED_FILE}
    side = return_side_files(around.checkpoint, around.place.names, folder, plan.files, unmissed)
    around.tell(side)
    if plan.source_class.can_generate():
        check_settings(folder)
    return side


def recorder(plan: Plan, checkpoint: Checkpoint, folder: Path) -> Callable[[SideFiles], None] | None:
    """What writes the record of an official checkpoint into a repo; None for a weight file, which has no way back."""
    known = plan.origin
    if known is None:
        return None

    def record(side: SideFiles) -> None:
        composite = checkpoint.fingerprint() if isinstance(checkpoint, TextCheckpoint) else {}
        origin = replace(known, files=side.record, composite=composite)
        (folder / ORIGIN).write_text(origin.text(), encoding="utf-8")
        write_unused(checkpoint, origin.unused, folder)

    return record


def _compare(
    plan: Plan, around: AroundWeights, side: SideFiles | None, folder: Path, report_progress: Progress, quick: bool
) -> None:
    """Compare models and, unless they belong to a composite checkpoint, tokenizers of both sides, and report it.

    Raises:
        ConversionError: they differ.
    """
    report = around.report
    report.parity = _verify(plan, around.place, folder, report_progress, quick)
    report.notes += [] if report.not_verified else report.parity.notes
    if quick and report.parity.measured:
        report.notes.append("compared on one text only (quick); a full comparison takes longer")
    if side is not None:
        around.compare_tokenizers(side)
    if report.not_verified:
        report.notes.append(f"not verified: {report.not_verified}")


@overload
def from_official(
    src: str | PathLike[str],
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
    *,
    output_loading_info: Literal[False] = False,
    **options: Any,
) -> PreTrainedModel: ...
@overload
def from_official(
    src: str | PathLike[str],
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
    *,
    output_loading_info: Literal[True],
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]: ...
def from_official(
    src: str | PathLike[str],
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
    *,
    output_loading_info: bool = False,
    **options: Any,
) -> PreTrainedModel | tuple[PreTrainedModel, dict[str, Any]]:
    """A Blockformer model with the weights of an official checkpoint, in memory; nothing is written.

    A Blockformer repo is loaded as it is.

    Args:
        src: a folder or Hub id, in an official layout; or a weight file, with `config`.
        dtype: "float32", "bfloat16" or "float16"; None or "auto" takes the dtype in `config.json` or, without one,
            the weights' own, as transformers does.
        family: the official family; None reads it from `model_type`. Required for a weight file.
        config: the JSON file with the settings of a weight file.
        output_loading_info: also return what transformers reports of loading.
        options: as in `from_pretrained`. Which files are read, and from where: see `convert`. How they are loaded:
            `device_map`, `max_memory`, `attn_implementation`, `quantization_config`; `add_pooling_layer` of an
            encoder; `offload_folder`, into which the converted weights are then written, tensor by tensor, so that
            the model need not fit into memory. They must stay there as long as the model is used. And fields of our
            config, such as `use_cache=False`. An option that is not followed is refused; one that means nothing here
            is named in a warning.

    Returns:
        The model, in evaluation mode; with `output_loading_info` a tuple, of the model and a dict.

    Raises:
        ConversionError: the checkpoint cannot be converted, as in `convert`. Or an option is refused.

    Examples:
        >>> model = blockformer.from_official("Qwen/Qwen3-0.6B")  # doctest: +SKIP
    """
    reading, loading, fields = sorted_options({"output_loading_info": output_loading_info, **options})
    cast = asked_dtype(dtype, loading.pop("torch_dtype", None))
    check_source(src, family, config, to_official=False, **reading)
    place = locate(src, config, **reading)
    if family is None and config is None and (place.path / "config.json").is_file():
        entries = read_config(place.path / "config.json")
        if is_ours(entries):
            return named(load_ours(place, entries, cast, fields, **loading), str(src), is_repo=True)
    with opened(place) as (checkpoint, notes):
        plan = plan_or_refer(checkpoint, family, cast)
        target = with_fields(plan.target_config, fields)
        notes += [*plan.notes, *dtype_note(target, plan.dtype)]
        notes += plan.family.settings.unused_note(checkpoint.config, only_misspelt=True)
        check_device_map(loading.get("device_map"))
        check_tied_targets(checkpoint, plan.groups, plan.tied)
        settings = settings_in(checkpoint, plan.target_config)
        generation = as_loaded(checkpoint, settings) if plan.target_class.can_generate() else None
        weights, stored, bad = None, None, []
        if loading.get("offload_folder") is None:
            weights = {name: tensor for group in plan.groups for name, tensor in group.apply(checkpoint.read)}
            weights = dict(sorted(weights.items()))  # as they stand in a file: the first decides where none is named
            bad = [name for name, tensor in weights.items() if nonfinite(tensor)]
        else:
            stored = written_weights(checkpoint, plan, loading["offload_folder"], notes)
        checkpoint.check_unchanged()
    if bad:
        notes.append(f"NaN or infinite values in {len(bad)} tensors:{listed(map(shown, bad))}")
    loading |= {"state_dict": weights, "dtype": "auto"}  # of the config, which has the requested one
    with removed_on_failure(stored):
        for note in notes:
            warnings.warn(f"{src}: {note}", stacklevel=2)
        made = load(plan.target_class, stored, target, fields, loading, generation)
    return named(made, str(src), is_repo=False)


def _verify(plan: Plan, source: Source, target: Path, report_progress: Progress, quick: bool) -> Parity:
    if plan.not_runnable:
        return Parity(notes=[f"not compared with the official model: {plan.not_runnable}"])
    kind = plan.dtype
    config = plan.source_config if plan.to_official else plan.target_config
    shift = plan.family.oracle.position_shift(config)
    exact = [group for group in plan.groups if group.targets[0].dtype.itemsize > kind.itemsize]
    exact += [group for group in plan.groups if low_bit_weights(targets_of([group]))]
    kept = {each for group in exact for name in group.sources for each in (name, plan.to_class(name))}
    kept |= low_bit_weights(kept)

    load_official = official_loader(plan, source)

    def load_source(dtype: torch.dtype) -> PreTrainedModel:
        if plan.to_official:
            model = load_model(plan.source_class, plan.source_config, source.path, dtype, source.loading)
            if lacks_pooler(plan):
                model.pooler = None
        else:
            model = load_official(plan.source_class, plan.source_config, source.path, dtype)
        model = rounded(model, kind, kept)
        return model if plan.to_official else plan.family.oracle.prepared(model)

    def load_target(dtype: torch.dtype) -> PreTrainedModel:
        load = load_official if plan.to_official else load_model
        model = load(plan.target_class, plan.target_config, target, dtype)
        return plan.family.oracle.prepared(model) if plan.to_official else model

    return verify_models(
        load_source,
        load_target,
        config,
        kind,
        plan.parameters * (1 if plan.read_plain is None else 2) + plan.others,  # plain weights come in addition
        report_progress,
        (0, shift) if plan.to_official else (shift, 0),
        plan.family.oracle.counts_padding,
        quick,
        plan.to_official,
    )


def _write_card(folder: Path, plan: Plan, around: AroundWeights) -> None:
    report, place = around.report, around.place
    kind = "file" if plan.family.is_file else "folder"
    name = f"`{place.hub_id}`" if place.hub_id else f"the {kind} `{(place.around or place.path).resolve().name}`"
    dtypes = ", ".join(report.dtypes)
    origin = f"Converted by Blockformer from {name}, a checkpoint of the `{plan.family.name}` family ({dtypes})."
    if getattr(plan.target_config, "linear_bits", None):
        origin += " The linear maps of its layers keep their 4-bit weights; no other package is needed to run them."
    compared = report.compared("Both models were run on the same random, structured and padded input:")
    around.write_card(folder, plan.target_config, plan.parameters, origin, compared)


def _notes_on(official: Mapping[str, Any], plan: Plan) -> list[str]:
    notes = []
    if official.get("auto_map"):
        notes.append("config.json: auto_map names code of the source; it was neither run nor copied")
    notes += note_on_unused(plan.family, official, plan.target_config)
    if isinstance(official.get("pad_token_id"), int) and official["pad_token_id"] < 0:
        reads = (
            "each row is read at its last place"
            if plan.target_config.pad_token_id
            else "the model has no padding token"
        )
        notes.append(f"config.json: pad_token_id {official['pad_token_id']} is not a token; {reads}")
    return notes
