"""Convert a checkpoint, either way: plan from the headers, write tensor by tensor, verify, publish in one step."""

import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import is_ours, read_config
from blockformer.files.errors import listed, shown
from blockformer.files.finite import nonfinite
from blockformer.files.front_matter import front_matter
from blockformer.files.generation_settings import settings_in
from blockformer.files.model_place import put_into_its_folder
from blockformer.files.names import WEIGHTS
from blockformer.files.new_repo import new_repo
from blockformer.files.returning import return_side_files
from blockformer.files.side_file_kinds import digest
from blockformer.files.side_files import SideFiles, carry_side_files, name_the_rest, refuse_adapters
from blockformer.files.sources import Reading, Source
from blockformer.files.tokenizers import compare_tokenizers, has_tokenizer
from blockformer.publishing import copy_code, write_card
from blockformer.publishing.repo_code import release_code

from .arguments import check_conversion, find_source, verification
from .into_memory import asked_dtype, dtype_note, load, load_ours, with_fields
from .offload import check_device_map, removed_on_failure, written_weights
from .options import sorted_options
from .origin import ORIGIN
from .other_entries import note_on_unused
from .plan import Plan, parse_dtype, plan_out
from .progress import Progress, silent
from .remedies import plan_official
from .report import ConversionReport
from .rules.table import check_tied
from .storage.awq import low_bit_weights, without
from .storage.unused_tensors import UNUSED_FILE, write_unused
from .verify import Parity, attention_of, load_model
from .verify import verify as verify_models
from .writing import memory_errors, opened, write_generation_config, write_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

LARGE = 500_000_000
"""Parameters above which the comparison is quick by default."""


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
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
    **reading: "Unpack[Reading]",
) -> ConversionReport:
    """Convert a checkpoint into a new folder, which appears complete or not at all.

    Peak memory is the largest group of tensors that are changed together, as they are read and as they are made, plus
    a constant; what is only renamed, cast or compared goes by in parts of 1 MiB. `verify` adds one whole model at a
    time, if it fits.

    Args:
        src: a folder or Hub id, in an official layout (with `to_official`, in ours); or a weight file, with `config`.
        dst: the folder to create. In our layout it is a self-contained `trust_remote_code` repo.
        to_official: convert from our layout back to the official one.
        family: the official family; None reads it from `model_type` or, on the way back, from the settings. A weight
            file requires it.
        config: the JSON file with the settings of a weight file.
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

    Raises:
        ConversionError: the source cannot be converted, or the target cannot be made. Nothing is left behind then.
    """
    start = time.monotonic()
    report_progress = progress or silent
    check_conversion(
        src,
        dst,
        to_official=to_official,
        family=family,
        config=config,
        dtype=dtype,
        dequantize=dequantize,
        max_shard_size=max_shard_size,
        force=force,
        strict_finite=strict_finite,
        verify=verify,
        **reading,
    )
    cast = parse_dtype(dtype if dequantize is None else dequantize)
    report_progress("looking at the source", 0, 0)
    place = find_source(src, family, config, to_official, **reading)
    refuse_adapters(place.path)
    with memory_errors(), opened(place) as (checkpoint, notes):
        if to_official:
            plan = plan_out(checkpoint, family, cast)
        else:
            plan = plan_official(checkpoint, family, cast, dequantize is not None)
        report = _report_on(plan, checkpoint, place.title(src), Path(dst), notes)
        with new_repo(dst, force=force, sources=place.files, check_sources=checkpoint.check_unchanged) as folder:
            _check_tied(checkpoint, plan)
            report.notes += write_weights(
                checkpoint, plan.groups, folder, max_shard_size, strict_finite, report_progress
            )
            (folder / "config.json").write_text(plan.config_json, encoding="utf-8")
            write_rest = _write_rest_of_official if to_official else _write_rest_of_ours
            side = write_rest(plan, checkpoint, place, folder)
            report.notes += [*side.notes, *side.lines]
            report.left_out = side.left_out
            level = verification(verify)
            if level != "none":
                quick = level == "quick" or (level == "auto" and plan.parameters > LARGE)
                _compare(plan, place, folder, report, side, report_progress, quick)
            report.has_tokenizer = plan.family.is_file or has_tokenizer(place.path)
            if inner := plan.files.get("inner"):
                put_into_its_folder(folder, inner, plan.files.get("around", ()))
            if not to_official:
                _write_card(folder, plan, checkpoint, place.hub_id, report)
            report_progress("putting the folder into place", 0, 0)
    report.seconds = time.monotonic() - start
    return report


def _report_on(plan: Plan, checkpoint: Checkpoint, source: str, target: Path, notes: list[str]) -> ConversionReport:
    """The report of a planned conversion: what it will write, and what the user should know of the source."""
    return ConversionReport(
        source,
        target,
        plan.family.name,
        plan.to_official,
        tensors=sum(len(group.targets) for group in plan.groups),
        nbytes=sum(plan.sizes.values()),
        dtypes=[str(kind).removeprefix("torch.") for kind in plan.sizes],
        notes=[
            *notes,
            *([] if plan.to_official else _notes_on(checkpoint.config, plan)),
            *plan.notes,
            *dtype_note(plan.target_config, plan.dtype),
        ],
    )


def _write_rest_of_official(plan: Plan, checkpoint: Checkpoint, place: Source, folder: Path) -> SideFiles:
    """Write what an official checkpoint holds next to its weights and config."""
    unmissed = {*release_code(checkpoint.folder, plan.source_config), *([ORIGIN] if plan.files else [])}
    if any(not group.sources for group in plan.groups):  # the tensors that no model uses are written
        unmissed |= {UNUSED_FILE}
    return return_side_files(checkpoint, place.names, folder, plan.files, unmissed)


def _write_rest_of_ours(plan: Plan, checkpoint: Checkpoint, place: Source, folder: Path) -> SideFiles:
    """Write the files of a repo of ours next to its weights and config, except for the card."""
    side = carry_side_files(checkpoint, place.names, folder)
    copy_code(folder, plan.target_config)
    for name, path in plan.family.extra_code().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(path.read_bytes())
    generation_file = write_generation_config(checkpoint, folder, _entries(plan, checkpoint), plan.target_config)
    if generation_file is not None:
        side.written[generation_file] = digest(folder / generation_file)
    side.is_recorded = plan.origin is not None
    name_the_rest(checkpoint, place.names, folder, side)
    if plan.origin is not None:
        origin = replace(plan.origin, files=side.record)
        (folder / ORIGIN).write_text(origin.text(), encoding="utf-8")
        write_unused(checkpoint, plan.origin.unused, folder)
    return side


def _compare(
    plan: Plan,
    source: Source,
    folder: Path,
    report: ConversionReport,
    side: SideFiles,
    report_progress: Progress,
    quick: bool,
) -> None:
    """Compare models and tokenizers of both sides, and report it.

    Raises:
        ConversionError: they differ.
    """
    report.parity = _verify(plan, source, folder, report_progress, quick)
    report.notes += [] if report.not_verified else report.parity.notes
    if quick and report.parity.measured:
        report.notes.append("compared on one text only (quick); a full comparison takes longer")
    found = compare_tokenizers(side.tokenizer, folder)
    report.notes += [found] if found else []
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
    """A model of ours with the weights of an official checkpoint, in memory; nothing is written.

    A repo of ours is loaded as it is.

    Args:
        src: a folder or Hub id, in an official layout; or a weight file, with `config`.
        dtype: "float32", "bfloat16" or "float16"; None or "auto" takes that of `config.json` or, if it names none, that
            of the weights, as transformers does.
        family: the official family; None reads it from `model_type`. Required for a weight file.
        config: the JSON file with the settings of a weight file.
        output_loading_info: return what transformers says of loading, too.
        options: those of `from_pretrained`. Which files are read, and from where: see `convert`. How they are loaded:
            `device_map`, `max_memory`, `attn_implementation`, `quantization_config`; `offload_folder`, into which the
            converted weights are then written, tensor by tensor, so that the model need not fit into memory. They must
            stay there as long as the model is used. And fields of our config, such as `use_cache=False`. An option
            that is not followed is refused; one that means nothing here is named in a warning.

    Returns:
        The model, in evaluation mode; with `output_loading_info` a tuple, of the model and a dict.

    Raises:
        ConversionError: the checkpoint cannot be converted; the checks are those of `convert`. Or an option is refused.

    Examples:
        >>> model = blockformer.from_official("Qwen/Qwen3-0.6B")  # doctest: +SKIP
    """
    reading, loading, fields = sorted_options({"output_loading_info": output_loading_info, **options})
    cast = asked_dtype(dtype, loading.pop("torch_dtype", None))
    place = find_source(src, family, config, **reading)
    refuse_adapters(place.path)
    if family is None and config is None and (place.path / "config.json").is_file():
        entries = read_config(place.path / "config.json")
        if is_ours(entries):
            return load_ours(place, entries, cast, fields, **loading)
    with memory_errors(), opened(place) as (checkpoint, notes):
        plan = plan_official(checkpoint, family, cast)
        target = with_fields(plan.target_config, fields)
        notes += [*plan.notes, *dtype_note(target, plan.dtype)]
        notes += plan.family.unused_note(checkpoint.config, only_misspelt=True)
        check_device_map(loading.get("device_map"))
        _check_tied(checkpoint, plan)
        generation = settings_in(checkpoint, _entries(plan, checkpoint), plan.target_config)
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
    loading |= {"state_dict": weights, "dtype": "auto"}  # of the config, which has the one that is asked for
    with removed_on_failure(stored):
        for note in notes:
            warnings.warn(f"{src}: {note}", stacklevel=2)
        return load(plan.target_class, stored, target, fields, loading, generation)


def _check_tied(checkpoint: Checkpoint, plan: Plan) -> None:
    makers = {target.name: (group, target) for group in plan.groups for target in group.targets}

    def parts(name: str) -> Iterator[Tensor]:
        group, target = makers[name]
        if not group.is_copy:
            return iter([dict(group.apply(checkpoint.read))[name]])
        return (part.to(target.dtype) for part in checkpoint.parts(group.sources[0]))

    check_tied(parts, plan.tied)


def _entries(plan: Plan, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The `config.json` that may hold generation settings; the settings of a weight file never do."""
    return plan.target_config.to_dict() if plan.family.is_file else checkpoint.config


def _verify(plan: Plan, source: Source, target: Path, report_progress: Progress, quick: bool) -> Parity:
    if plan.not_runnable:
        return Parity(notes=[f"not compared with the official model: {plan.not_runnable}"])
    kind = plan.dtype
    config = plan.source_config if plan.to_official else plan.target_config
    shift = plan.family.position_shift(config)
    kept = low_bit_weights(target.name for group in plan.groups for target in group.targets)
    wide = [group for group in plan.groups if group.targets[0].dtype.itemsize > kind.itemsize]
    kept |= {each for group in wide for name in group.sources for each in (name, plan.todays(name))}

    def load_official(model_class: type[PreTrainedModel], config: PretrainedConfig, folder: Path, dtype: torch.dtype):
        if plan.read_plain is not None:  # the official way to run it needs other packages or hardware
            plain = type(config)(**without(config.to_dict()))
            with Checkpoint(folder, weights=WEIGHTS if plan.to_official else source.weights) as checkpoint:
                settings = {"state_dict": plan.read_plain(checkpoint, dtype), "dtype": dtype}
            attention = attention_of(model_class, config)
            settings |= plan.official_arguments
            return model_class.from_pretrained(None, config=plain, attn_implementation=attention, **settings)
        arguments = {**plan.official_arguments, **({} if plan.to_official else source.loading)}
        return load_model(model_class, config, folder, dtype, arguments)

    def load_source(dtype: torch.dtype) -> PreTrainedModel:
        if plan.to_official:
            model = load_model(plan.source_class, plan.source_config, source.path, dtype, source.loading)
        else:
            model = load_official(plan.source_class, plan.source_config, source.path, dtype)
        model = _rounded(model, kind, kept)
        return model if plan.to_official else plan.family.prepare_official_model(model)

    def load_target(dtype: torch.dtype) -> PreTrainedModel:
        load = load_official if plan.to_official else load_model
        model = load(plan.target_class, plan.target_config, target, dtype)
        return plan.family.prepare_official_model(model) if plan.to_official else model

    return verify_models(
        load_source,
        load_target,
        config,
        kind,
        plan.parameters * (1 if plan.read_plain is None else 2),  # plain weights are made in addition to the model
        report_progress,
        (0, shift) if plan.to_official else (shift, 0),
        plan.family.counts_padding,
        plan.family.padding_by_token,
        quick,
        plan.to_official,
    )


@torch.no_grad()
def _rounded(model: PreTrainedModel, dtype: torch.dtype, but: Collection[str] = ()) -> PreTrainedModel:
    """Round a model's weights to a dtype, so that a requested cast does not count as a difference."""
    for name, tensor in model.state_dict().items():
        if name not in but and tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize:
            tensor.copy_(tensor.to(dtype))
    return model


def _write_card(folder: Path, plan: Plan, checkpoint: Checkpoint, hub_id: str | None, report: ConversionReport) -> None:
    source = checkpoint.around or checkpoint.folder
    kind = "file" if plan.family.is_file else "folder"
    name = f"`{hub_id}`" if hub_id else f"the {kind} `{source.resolve().name}`"
    low = " The linear maps of its layers keep their 4-bit weights; no other package is needed to run them."
    dtypes = ", ".join(report.dtypes)
    lines = [] if report.parity is None else [f"- {line}" for line in str(report.parity).split("; ") if line]
    notes = "; ".join(report.parity.notes) if report.parity is not None else ""
    parity = "\n".join(["Both models were run on the same random, structured and padded input:", "", *lines])
    nothing = f"{notes[:1].upper()}{notes[1:]}." if notes else "Not compared: the conversion ran without verification."
    if report.not_verified:
        nothing = f"**Not verified:** {report.not_verified}."
    write_card(
        folder,
        plan.target_config,
        origin=f"Converted by Blockformer from {name}, a checkpoint of the `{plan.family.name}` family ({dtypes})."
        + (low if getattr(plan.target_config, "linear_bits", None) else ""),
        base_model=hub_id,
        front={} if plan.family.is_file else front_matter(checkpoint),
        parity=parity if report.parity is not None and not report.not_verified else nothing,
        parameters=plan.parameters,
        left_out=report.left_out,
    )


def _notes_on(official: Mapping[str, Any], plan: Plan) -> list[str]:
    notes = []
    if official.get("auto_map"):
        notes.append("config.json: auto_map names code of the source; it was neither run nor copied")
    notes += note_on_unused(plan.family, official, plan.target_config)
    if isinstance(official.get("pad_token_id"), int) and official["pad_token_id"] < 0:
        notes.append(
            f"config.json: pad_token_id {official['pad_token_id']} is not a token; the model has no padding token"
        )
    return notes
