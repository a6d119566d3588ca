"""Converting a checkpoint, either way: plan from the headers, write tensor by tensor, compare, publish in one step."""

import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from blockformer.export import copy_code, write_card

from .atomic import atomic_folder
from .checkpoint import Checkpoint, nonfinite, read_json
from .errors import ConversionError, listed, shown
from .families import Family, find_source
from .generation import FILE, settings_in
from .kept import KEPT, write_kept
from .mapping import Group, check_tied
from .plan import (
    MEMORY,
    Plan,
    architecture_of,
    expected_tensors,
    identity_rules,
    json_text,
    memory_text,
    our_config,
    parse_dtype,
    plan_in,
    plan_out,
    stored_pairs,
)
from .side_files import compare_tokenizers, copy_side_files, refuse_adapters
from .sources import Source, locate
from .verify import Parity, load_model
from .verify import verify as verify_models
from .writer import ShardWriter, parse_size

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0: not known)."""


@dataclass
class ConversionReport:
    """What a conversion did.

    Attributes:
        source: the folder or Hub id that was read.
        target: the folder that was made.
        family: the official family.
        to_official: the direction.
        tensors: how many were written.
        nbytes: bytes of their data.
        dtypes: their dtypes, the most bytes first.
        seconds: wall-clock time.
        parity: the comparison with the source, or None if there was none.
        notes: what a user should know.
    """

    source: str
    target: Path
    family: str
    to_official: bool
    tensors: int = 0
    nbytes: int = 0
    dtypes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    parity: Parity | None = None
    notes: list[str] = field(default_factory=list)


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    to_official: bool = False,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    force: bool = False,
    strict_finite: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a checkpoint into a new folder, which appears whole or not at all.

    Peak memory is the largest tensor and a constant, without `verify`; with it, one model at a time where that fits.

    Args:
        src: a folder or Hub id, in an official layout; with `to_official` in ours. Or a weight file, with `config`.
        dst: the folder to make. Towards ours it becomes a self-contained `trust_remote_code` repo.
        to_official: the way back.
        family: the official family; None takes it from `model_type` or, on the way back, from the settings. A weight
            file needs it.
        config: the JSON file with the settings of a weight file.
        dtype: cast the weights to "float32", "bfloat16" or "float16"; None keeps each tensor's own.
        max_shard_size: bytes ("5GB") after which a new weight file begins.
        verify: run both models on the same input; a difference is an error.
        force: replace a model folder that is there already.
        strict_finite: refuse NaN and infinite weights instead of reporting them.
        progress: told how far it is.

    Raises:
        ConversionError: the source cannot be converted, or the target cannot be made. Nothing is left behind then.
    """
    start = time.monotonic()
    tell: Progress = progress or (lambda step, done, total: None)
    parse_size(max_shard_size)
    cast = parse_dtype(dtype)
    tell("looking at the source", 0, 0)
    place = find_source(src, family, config, to_official)
    folder, hub_id = place.path, place.hub_id
    refuse_adapters(folder)
    with _memory_errors(), _opened(place) as (checkpoint, notes):
        plan = plan_out(checkpoint, family, cast) if to_official else plan_in(checkpoint, family, cast)
        report = ConversionReport(hub_id or os.fspath(src), Path(dst), plan.family.name, to_official, notes=notes)
        report.dtypes = [str(kind).removeprefix("torch.") for kind in plan.sizes]
        report.tensors = sum(len(group.targets) for group in plan.groups)
        report.nbytes = sum(plan.sizes.values())
        if not to_official:
            report.notes += _notes_on(checkpoint.config, plan.family)
        with atomic_folder(dst, force=force, sources=place.files) as temporary:
            _check_tied(checkpoint, plan)
            report.notes += _write_weights(checkpoint, plan.groups, temporary, max_shard_size, strict_finite, tell)
            (temporary / "config.json").write_text(plan.config_json, encoding="utf-8")
            report.notes += copy_side_files(checkpoint, temporary)
            if not to_official:
                copy_code(temporary, plan.target_config)
                _write_generation_config(temporary, _entries(plan, checkpoint), plan.target_config)
                if not plan.family.is_file:
                    (temporary / MEMORY).write_text(memory_text(plan, checkpoint.config), encoding="utf-8")
                    write_kept(checkpoint, plan.kept, temporary)
            if verify:
                report.parity = _verify(plan, folder, temporary, to_official, tell)
                report.notes += report.parity.notes
                found = compare_tokenizers(folder, temporary, to_official)
                report.notes += [found] if found else []
            if not to_official:
                _write_card(temporary, plan, folder, hub_id, report)
            checkpoint.check_unchanged()
            tell("putting the folder into place", 0, 0)
    report.seconds = time.monotonic() - start
    return report


def from_official(
    src: str | PathLike[str],
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
) -> PreTrainedModel:
    """A model of ours with the weights of an official checkpoint, in memory; nothing is written.

    Args:
        src: a folder or Hub id, in an official layout; or a weight file, with `config`.
        dtype: "float32", "bfloat16" or "float16"; None keeps the checkpoint's.
        family: the official family; None takes it from `model_type`. A weight file needs it.
        config: the JSON file with the settings of a weight file.

    Returns:
        The model, in evaluation mode.

    Raises:
        ConversionError: the checkpoint cannot be converted; as strict as `convert`.

    Example:
        >>> model = blockformer.from_official("Qwen/Qwen3-0.6B")  # doctest: +SKIP
    """
    cast = parse_dtype(dtype)
    place = find_source(src, family, config)
    folder = place.path
    refuse_adapters(folder)
    with _memory_errors(), _opened(place) as (checkpoint, notes):
        plan = plan_in(checkpoint, family, cast)
        _check_tied(checkpoint, plan)
        weights = {name: tensor for group in plan.groups for name, tensor in group.apply(checkpoint.read)}
        bad = [name for name, tensor in weights.items() if nonfinite(tensor)]
        generation = settings_in(folder, _entries(plan, checkpoint), plan.target_config)
        checkpoint.check_unchanged()
    if bad:
        notes.append(f"NaN or infinite values in {len(bad)} tensors:{listed(map(shown, bad))}")
    for note in notes:
        warnings.warn(f"{src}: {note}", stacklevel=2)
    kind = next(iter(plan.sizes))
    model = plan.target_class.from_pretrained(None, config=plan.target_config, state_dict=weights, dtype=kind)
    if model.can_generate():
        model.generation_config = GenerationConfig.from_dict(generation)
    return model.eval()


def export_folder(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    strict_finite: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Make a self-contained repo of a folder in our layout (a `Trainer` checkpoint, say), tensor by tensor.

    Args:
        src: a folder or Hub id.
        dst: the repo to make.
        max_shard_size: bytes ("5GB") after which a new weight file begins.
        force: replace a model folder that is there already.
        strict_finite: refuse NaN and infinite weights instead of reporting them.
        progress: told how far it is.

    Raises:
        ConversionError: see `convert`.
    """
    import blockformer

    start = time.monotonic()
    tell: Progress = progress or (lambda step, done, total: None)
    parse_size(max_shard_size)
    folder, hub_id = locate(src)
    refuse_adapters(folder)
    with _memory_errors(), _opened(Source(folder)) as (checkpoint, notes):
        config = our_config(checkpoint.config)
        architecture = architecture_of(config)
        if architecture not in {target.rpartition(".")[2] for target in type(config).auto_classes.values()}:
            raise ConversionError(f"{folder}: config.json: architectures names {shown(architecture)}, no class of ours")
        model_class = getattr(blockformer, architecture)
        shapes, tied, parameters = expected_tensors(model_class, config)
        groups = identity_rules(shapes).plan(checkpoint.tensors, shapes, optional=tied)
        report = ConversionReport(hub_id or os.fspath(src), Path(dst), "", False, notes=notes)
        report.tensors = len(groups)
        with atomic_folder(dst, force=force, sources=[folder]) as temporary:
            check_tied(checkpoint.read, stored_pairs(tied, groups))
            report.notes += _write_weights(checkpoint, groups, temporary, max_shard_size, strict_finite, tell)
            (temporary / "config.json").write_text(config.to_json_string(), encoding="utf-8")
            report.notes += copy_side_files(checkpoint, temporary)
            copy_code(temporary, config)
            _write_generation_config(temporary, checkpoint.config, config)
            if os.path.lexists(folder / MEMORY):
                (temporary / MEMORY).write_text(json_text(read_json(folder / MEMORY)), encoding="utf-8")
                if (folder / KEPT).exists():
                    (temporary / KEPT).parent.mkdir()
                    shutil.copyfile(checkpoint._member(KEPT), temporary / KEPT)
            generation = read_json(temporary / "generation_config.json")
            generation.pop("transformers_version", None)
            write_card(temporary, config, parameters=parameters, generation=generation)
            checkpoint.check_unchanged()
    report.seconds = time.monotonic() - start
    return report


@contextmanager
def _opened(place: Source):
    """The checkpoint of a source and a list that begins with the warnings of opening it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = Checkpoint(place.path, place.config)
    with checkpoint:
        yield checkpoint, [str(warning.message) for warning in caught]


@contextmanager
def _memory_errors():
    """Torch reports a lack of memory as a RuntimeError."""
    try:
        yield
    except MemoryError as error:
        raise ConversionError("out of memory; free some, or convert with --no-verify") from error
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise ConversionError(f"out of memory; free some, or convert with --no-verify ({reason})") from error


def _check_tied(checkpoint: Checkpoint, plan: Plan) -> None:
    makers = {target.name: group for group in plan.groups for target in group.targets}

    def read(name: str) -> Tensor:
        return dict(makers[name].apply(checkpoint.read))[name]

    check_tied(read, plan.tied)


def _write_weights(
    checkpoint: Checkpoint,
    groups: list[Group],
    folder: Path,
    max_shard_size: int | str,
    strict_finite: bool,
    tell: Progress,
) -> list[str]:
    """Write every group, one after the other; returns what a user should know of the values."""
    planned = [(target.name, target.dtype, target.shape) for group in groups for target in group.targets]
    total = sum(torch.Size(shape).numel() * kind.itemsize for _, kind, shape in planned)
    done, bad = 0, []
    with ShardWriter(folder, planned, max_shard_size) as writer:
        for group in groups:
            made = group.apply(checkpoint.read)
            while made:
                name, tensor = made.pop(0)
                count = nonfinite(tensor)
                if count:
                    bad.append(f"{shown(name)}: {count} of {tensor.numel()} in {str(tensor.dtype)[6:]}")
                writer.write(name, tensor)
                done += tensor.nbytes
                del tensor
                tell("writing weights", done, total)
    if bad and strict_finite:
        raise ConversionError(f"{checkpoint.folder}: NaN or infinite values:{listed(bad)}")
    return [f"NaN or infinite values (kept as they are):{listed(bad)}"] if bad else []


def _write_generation_config(folder: Path, entries: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Write generation settings into a repo where the source had no file of them."""
    if not (folder / FILE).exists():
        (folder / FILE).write_text(json_text(settings_in(folder, entries, config)), encoding="utf-8")


def _entries(plan: Plan, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The `config.json` that may speak of generation; the settings of a weight file do not."""
    return plan.target_config.to_dict() if plan.family.is_file else checkpoint.config


def _verify(plan: Plan, source: Path, target: Path, to_official: bool, tell: Progress) -> Parity:
    if plan.not_runnable:
        return Parity(notes=[f"not compared with the official model: {plan.not_runnable}"])
    kind = next(iter(plan.sizes))
    config = plan.source_config if to_official else plan.target_config
    shift = plan.family.shift(config)

    def load_source(dtype: torch.dtype) -> PreTrainedModel:
        arguments = {} if to_official else plan.official_arguments
        model = _rounded(load_model(plan.source_class, plan.source_config, source, dtype, arguments), kind)
        return model if to_official else plan.family.settle(model)

    def load_target(dtype: torch.dtype) -> PreTrainedModel:
        arguments = plan.official_arguments if to_official else {}
        model = load_model(plan.target_class, plan.target_config, target, dtype, arguments)
        return plan.family.settle(model) if to_official else model

    return verify_models(
        load_source,
        load_target,
        config,
        kind,
        plan.parameters,
        lambda step: tell(step, 0, 0),
        (0, shift) if to_official else (shift, 0),
    )


@torch.no_grad()
def _rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights rounded to a dtype, so that a cast that was asked for is no difference."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize:
            tensor.copy_(tensor.to(dtype))
    return model


def _write_card(folder: Path, plan: Plan, source: Path, hub_id: str | None, report: ConversionReport) -> None:
    kind = "file" if plan.family.is_file else "folder"
    name = f"`{hub_id}`" if hub_id else f"the {kind} `{source.resolve().name}`"
    dtypes = ", ".join(report.dtypes)
    generation = read_json(folder / "generation_config.json")
    generation.pop("transformers_version", None)
    lines = [] if report.parity is None else [f"- {line}" for line in str(report.parity).split("; ") if line]
    notes = "; ".join(report.parity.notes) if report.parity is not None else ""
    parity = "\n".join(
        [
            "Both models were run on the same random, structured and padded input:",
            "",
            *lines,
        ]
    )
    nothing = f"{notes[:1].upper()}{notes[1:]}." if notes else "Not compared: the conversion ran with --no-verify."
    write_card(
        folder,
        plan.target_config,
        origin=f"Converted by Blockformer from {name}, a checkpoint of the `{plan.family.name}` family ({dtypes}).",
        base_model=hub_id,
        parity=parity if report.parity is not None and report.parity.measured else nothing,
        parameters=plan.parameters,
        generation=generation,
    )


def _notes_on(official: Mapping[str, Any], family: Family) -> list[str]:
    notes = []
    if official.get("auto_map"):
        notes.append("config.json: auto_map names code of the source; it was neither run nor copied")
    unused = family.unused(official)
    if unused:
        notes.append(f"config.json: settings that {family.name} does not use: {', '.join(map(shown, unused))}")
    if isinstance(official.get("pad_token_id"), int) and official["pad_token_id"] < 0:
        notes.append(f"config.json: pad_token_id {official['pad_token_id']} is no token; there is no padding token")
    return notes
