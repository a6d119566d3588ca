"""Convert a checkpoint, either way: plan from the headers, write tensor by tensor, verify, publish in one step."""

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from blockformer.publishing import copy_code, write_card

from .arguments import check_conversion, find_source, verification
from .errors import ConversionError, listed, shown
from .families.registry import Family
from .files.checkpoint import Checkpoint, nonfinite, read_config
from .files.front_matter import front_matter
from .files.generation_settings import settings_in
from .files.new_repo import new_repo
from .files.repo import memory_errors, opened, write_generation_config, write_weights
from .files.side_files import SideFiles, carry_side_files, digest, refuse_adapters, return_side_files
from .files.sources import Source
from .files.tokenizers import compare_tokenizers, has_tokenizer
from .files.unused_tensors import write_unused
from .origin import ORIGIN
from .plan import Plan, architecture_of, is_ours, our_config, parse_dtype, plan_in, plan_out
from .progress import Progress, silent
from .report import ConversionReport
from .rules.table import check_tied
from .storage.awq import low_bit_weights, without
from .verify import Parity, attention_of, load_model
from .verify import verify as verify_models

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
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a checkpoint into a new folder, which appears complete or not at all.

    Peak memory is the largest tensor plus a constant; `verify` adds one whole model at a time, if it fits.

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
        revision: of a Hub id, a branch, tag or commit.
        token: for a Hub id, as `from_pretrained` takes it; None takes the one of `hf auth login`.
        cache_dir: where a Hub id is downloaded to, if not to the Hub's own cache.
        progress: receives progress reports.

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
        revision=revision,
        verify=verify,
    )
    cast = parse_dtype(dtype if dequantize is None else dequantize)
    report_progress("looking at the source", 0, 0)
    place = find_source(src, family, config, to_official, revision=revision, token=token, cache_dir=cache_dir)
    refuse_adapters(place.path)
    with memory_errors(), opened(place) as (checkpoint, notes):
        if to_official:
            plan = plan_out(checkpoint, family, cast)
        else:
            plan = plan_in(checkpoint, family, cast, dequantize is not None)
        report = _report_on(plan, checkpoint, place.hub_id or os.fspath(src), Path(dst), notes)
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
                _compare(plan, place.path, folder, report, side, report_progress, quick)
            report.has_tokenizer = plan.family.is_file or has_tokenizer(place.path)
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
        notes=[*notes, *([] if plan.to_official else _notes_on(checkpoint.config, plan.family)), *plan.notes],
    )


def _write_rest_of_official(plan: Plan, checkpoint: Checkpoint, place: Source, folder: Path) -> SideFiles:
    """Write what an official checkpoint holds next to its weights and config."""
    return return_side_files(checkpoint, place.names, folder, plan.files)


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
    if plan.origin is not None:
        origin = replace(plan.origin, files=side.record)
        (folder / ORIGIN).write_text(origin.text(), encoding="utf-8")
        write_unused(checkpoint, plan.origin.unused, folder)
    return side


def _compare(
    plan: Plan,
    source: Path,
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


def from_official(
    src: str | PathLike[str],
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | PathLike[str] | None = None,
    **loading: Any,
) -> PreTrainedModel:
    """A model of ours with the weights of an official checkpoint, in memory; nothing is written.

    A repo of ours is loaded as it is.

    Args:
        src: a folder or Hub id, in an official layout; or a weight file, with `config`.
        dtype: "float32", "bfloat16" or "float16"; None or "auto" keeps the checkpoint's.
        family: the official family; None reads it from `model_type`. Required for a weight file.
        config: the JSON file with the settings of a weight file.
        revision: of a Hub id, a branch, tag or commit.
        token: for a Hub id, as `from_pretrained` takes it; None takes the one of `hf auth login`.
        cache_dir: where a Hub id is downloaded to, if not to the Hub's own cache.
        loading: further options of `from_pretrained`: `device_map`, `max_memory`, `attn_implementation`,
            `quantization_config`; `offload_folder`, into which the converted weights are then written, tensor by
            tensor, so that the model need not fit into memory. They must stay there as long as the model is used.

    Returns:
        The model, in evaluation mode.

    Raises:
        ConversionError: the checkpoint cannot be converted; the checks are those of `convert`.

    Examples:
        >>> model = blockformer.from_official("Qwen/Qwen3-0.6B")  # doctest: +SKIP
    """
    if "torch_dtype" in loading:  # its name before transformers 5
        named = loading.pop("torch_dtype")
        if dtype is not None and parse_dtype(dtype) != parse_dtype(named):
            raise ConversionError(
                f"dtype={shown(dtype)} and torch_dtype={shown(named)} contradict each other; give only dtype"
            )
        dtype = named
    cast = parse_dtype(None if dtype == "auto" else dtype)
    place = find_source(src, family, config, revision=revision, token=token, cache_dir=cache_dir)
    folder = place.path
    refuse_adapters(folder)
    if family is None and config is None and (folder / "config.json").is_file():
        entries = read_config(folder / "config.json")
        if is_ours(entries):
            return load_ours(folder, entries, cast, **loading)
    with memory_errors(), opened(place) as (checkpoint, notes):
        plan = plan_in(checkpoint, family, cast)
        notes += [*plan.notes, *plan.family.unused_note(checkpoint.config, only_misspelt=True)]
        _check_tied(checkpoint, plan)
        weights, stored, bad = None, None, []
        if loading.get("offload_folder") is None:
            weights = {name: tensor for group in plan.groups for name, tensor in group.apply(checkpoint.read)}
            bad = [name for name, tensor in weights.items() if nonfinite(tensor)]
        else:
            stored = _written_weights(checkpoint, plan, loading["offload_folder"], notes)
        generation = settings_in(checkpoint, _entries(plan, checkpoint), plan.target_config)
        checkpoint.check_unchanged()
    if bad:
        notes.append(f"NaN or infinite values in {len(bad)} tensors:{listed(map(shown, bad))}")
    for note in notes:
        warnings.warn(f"{src}: {note}", stacklevel=2)
    model = plan.target_class.from_pretrained(
        stored, config=plan.target_config, state_dict=weights, dtype=plan.dtype, **loading
    )
    if model.can_generate():
        model.generation_config = GenerationConfig.from_dict(generation)
    return model.eval()


def load_ours(
    folder: Path, entries: Mapping[str, Any], dtype: torch.dtype | None = None, **loading: Any
) -> PreTrainedModel:
    """The model of a folder in our layout, in evaluation mode; `loading` holds further options of `from_pretrained`."""
    import blockformer

    with opened(Source(folder)):  # checks all headers, and that nothing leads out of the folder
        pass
    config = our_config(entries)
    model_class = getattr(blockformer, architecture_of(config))
    loading |= {"config": config, "dtype": dtype or "auto", "local_files_only": True}
    return model_class.from_pretrained(folder, **loading).eval()


def _written_weights(checkpoint: Checkpoint, plan: Plan, place: str | PathLike[str], notes: list[str]) -> str:
    """A new folder with the converted weights, in the one for weights that do not fit into memory."""
    Path(place).mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="blockformer-", dir=place)
    try:
        notes += write_weights(checkpoint, plan.groups, Path(folder), "5GB", False, silent)
        Path(folder, "config.json").write_text(plan.config_json, encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _check_tied(checkpoint: Checkpoint, plan: Plan) -> None:
    makers = {target.name: group for group in plan.groups for target in group.targets}

    def read(name: str) -> Tensor:
        return dict(makers[name].apply(checkpoint.read))[name]

    check_tied(read, plan.tied)


def _entries(plan: Plan, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The `config.json` that may hold generation settings; the settings of a weight file never do."""
    return plan.target_config.to_dict() if plan.family.is_file else checkpoint.config


def _verify(plan: Plan, source: Path, target: Path, report_progress: Progress, quick: bool) -> Parity:
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
            with Checkpoint(folder) as checkpoint:
                settings = {"state_dict": plan.read_plain(checkpoint, dtype), "dtype": dtype}
            attention = attention_of(model_class, config)
            settings |= plan.official_arguments
            return model_class.from_pretrained(None, config=plain, attn_implementation=attention, **settings)
        return load_model(model_class, config, folder, dtype, plan.official_arguments)

    def load_source(dtype: torch.dtype) -> PreTrainedModel:
        load = load_model if plan.to_official else load_official
        model = _rounded(load(plan.source_class, plan.source_config, source, dtype), kind, kept)
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
    source = checkpoint.folder
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


def _notes_on(official: Mapping[str, Any], family: Family) -> list[str]:
    notes = []
    if official.get("auto_map"):
        notes.append("config.json: auto_map names code of the source; it was neither run nor copied")
    notes += family.unused_note(official)
    if isinstance(official.get("pad_token_id"), int) and official["pad_token_id"] < 0:
        notes.append(
            f"config.json: pad_token_id {official['pad_token_id']} is not a token; the model has no padding token"
        )
    return notes
