"""From the names in a file to the released names: what is wrong on the way, and the groups that put it right.

Every step that the tensors determine is taken. One that they do not determine is a finding whose remedy names the
option that says it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from blockformer.conversion.composite import in_text
from blockformer.conversion.families.composites import COMPOSITES
from blockformer.conversion.model_tensors import with_sources
from blockformer.conversion.plan import Plan, dtype_entry
from blockformer.conversion.remedies import plan_official
from blockformer.conversion.rules.groups import Group, Target, copy_of, targets_of
from blockformer.files.errors import ConversionError, MisfitError, shown
from blockformer.files.quantized import check_plain, packed_by_mlx, quantized_entries
from blockformer.files.quiet import quiet
from blockformer.files.safetensors_io import TensorInfo
from blockformer.publishing.repo_code import full_auto_map

from .adapters import WithAdapter
from .any_checkpoint import AnyCheckpoint, Changed
from .as_it_is import foreign, layouts_as_it_is
from .early_settings import of_tokens, settled
from .finding import ERROR, NOTE, WARNING, Finding, are, counted, entries_set
from .fused import split_joined
from .kin import all_known_beginnings
from .known_codes import OWN_CODE, code_of
from .layouts import Layouts, all_names, layouts_of, missing_ties
from .lora import merged
from .mapped import mapped
from .name_findings import example, of_error, of_fits, of_layout, of_names, wrong_shapes
from .name_map import read_map
from .options import Options
from .own_code import CONFIG, OwnCode
from .prefixes import Unwrapped, unwrapped
from .renames import asked_names
from .telling_names import not_a_model, of_adapter, of_another_family
from .unknown_family import of_no_family
from .weight_files import ADAPTER

SAID_NOWHERE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "initializer_range")
"""Entries that the settings of training code lack."""
TRIES = 4
"""Changes of `config.json` that are made one after the other."""


@dataclass
class Examination:
    """A checkpoint, and what would make a whole one in the released layout of it.

    Attributes:
        checkpoint: as it is.
        config: the `config.json` that is written.
        groups: what makes the tensors that are written.
        layouts: of the model; None where its config is unknown.
        plan: of its conversion as it would be written; None where it does not convert.
        findings, changes: see `Diagnosis`.
        is_whole: whether what would be written is a whole checkpoint.
        code: the training code whose checkpoint it is.
        is_one_model: whether its tensors are weights of one model as they are.
    """

    checkpoint: AnyCheckpoint
    config: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    layouts: Layouts | None = None
    plan: Plan | None = None
    findings: list[Finding] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    is_whole: bool = False
    code: OwnCode | None = None
    is_one_model: bool = True

    @property
    def written(self) -> Changed:
        """The checkpoint as it would be written."""
        return Changed(self.checkpoint, self.groups, self.config)

    def make_plan(self, family: str | None) -> None:
        """Plan the conversion of what would be written, or of the text in it.

        Raises:
            ConversionError: it does not convert.
        """
        with quiet():
            self.plan = plan_official(in_text(self.written), family, None)


def examine(checkpoint: AnyCheckpoint, options: Options) -> Examination:
    """Examine names, shapes and settings; no numbers are read, except where a family's variant depends on them."""
    found = Examination(checkpoint, {**checkpoint.config, **options.settings})
    names = asked_names(checkpoint.tensors, options.renames, options.dropped)
    _note_what_is_asked(found, options)
    if not names or checkpoint.kind == ADAPTER:
        found.findings += of_adapter(checkpoint.tensors)
        return found
    if packed := packed_by_mlx(checkpoint.tensors):
        found.findings.append(Finding("mlx", ERROR, *packed))
        found.is_one_model = False
        return found
    if options.names is not None:
        _map(found, names, options)
        return found
    if _is_of_own_code(found, names, options):
        return found
    headers = {name: checkpoint.tensors[old] for name, old in names.items()}
    known = all_names(found.config, options.family) or all_known_beginnings()
    if (told := not_a_model(names, headers, found.config, known)) is not None:
        found.findings.append(told)
        found.is_one_model = False
        return found
    _drop_stale_quantization(found)
    if not (found.config.get("model_type") or options.family):
        found.findings += of_no_family(names, found.config, checkpoint.folder)
        return found
    early = settled(found.config, names)
    found.config = early.entries
    for _ in range(TRIES):
        findings, changes, fits = _names_and_shapes(found, names, options)
        if not fits:
            break
        before = {name: found.config.get(name) for name in fits}
        found.config |= fits
        found.findings.append(of_fits(before, fits))
        found.changes += entries_set(fits)
    found.config |= of_tokens(early, found.config, checkpoint.folder)
    found.findings += [*early.findings, *findings]
    found.changes += [*early.changes, *changes]
    return found


def _is_of_own_code(found: Examination, names: Mapping[str, str], options: Options) -> bool:
    """Whether these are the tensors of known training code; then the groups lead to its family's model."""
    plain = unwrapped([*names], {name for each in OWN_CODE for name in each.shows})
    own = {name: names[old] for name, old in plain.names.items()}
    headers = {name: found.checkpoint.tensors[old] for name, old in own.items()}
    code = code_of(headers, found.checkpoint)
    if code is None:
        return False
    found.code = code
    said = f"this is a checkpoint of {code.name}, which no library loads"
    try:
        settings = code.settings(found.checkpoint, found.checkpoint.extras, found.config)
        made = code.config(settings, headers) | ({} if code.key == CONFIG else dict(options.settings))
        entries = _also(found.config, made) | made
        found.layouts = layouts_of(entries, None)
        found.groups = _cast(with_sources(code.groups(headers, found.layouts), own), options.dtype)
        found.config = entries | ({} if options.dtype is None else {"dtype": options.dtype})
        _plan_of_own_code(found)
    except ConversionError as error:
        found.findings.append(Finding("own-code", ERROR, said, str(error)))
        return True
    found.is_whole = True
    kind = entries["architectures"][0]
    fix = f"--mend writes it as {kind}, which computes the same"
    found.findings += [*plain.findings, Finding("own-code", WARNING, said, fix, True)]
    found.changes += [*plain.changes, f"written as {kind}, with a config.json made from its {code.key}"]
    return True


def _plan_of_own_code(found: Examination) -> None:
    """Check that the groups make the whole model.

    Raises:
        ConversionError: they do not.
    """
    layouts = found.layouts
    if layouts is None or layouts.family is not None:
        found.make_plan(None)
        return
    made = targets_of(found.groups).keys()
    missing = {name: shape for name, shape in layouts.released.items() if name not in made | layouts.optional}
    wrong = [*of_names({}, missing), *wrong_shapes(found.groups, layouts.released)]
    if wrong:
        raise ConversionError("; ".join(each.sentence for each in wrong))
    found.config["auto_map"] = full_auto_map(layouts.config)


def _also(config: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """What the `config.json` next to such weights says of the same model, and settings of training code do not."""
    if config.get("model_type") != entries["model_type"]:
        return {}
    return {name: config[name] for name in SAID_NOWHERE if name in config}


def _map(found: Examination, names: Mapping[str, str], options: Options) -> None:
    """Fill in the model that a file of names makes of the tensors."""
    tensors = found.checkpoint.tensors
    settings = {**options.settings, **({} if options.dtype is None else {"dtype": options.dtype})}
    made = mapped(read_map(options.names or ""), tensors, names, found.checkpoint.config, settings, options.family)
    found.config, found.layouts, found.groups = made.config, made.layouts, _cast(made.groups, options.dtype)
    if made.layouts.family is not None:
        found.make_plan(options.family)
    found.is_whole = True
    found.findings += made.findings
    found.changes += made.changes


def _note_what_is_asked(found: Examination, options: Options) -> None:
    """What the user says is wrong, as a finding each."""
    asked = [
        *entries_set(options.settings),
        *(f"{each.partition('=')[0]!r} renamed to {each.partition('=')[2]!r}" for each in options.renames),
        *(f"{shown(name)} left out" for name in options.dropped),
    ]
    found.changes += asked
    found.findings += [Finding("asked", WARNING, each, "as you said", True) for each in asked]


def _drop_stale_quantization(found: Examination) -> None:
    try:
        check_plain(found.config, found.checkpoint.tensors)
    except ConversionError as error:
        entry = quantized_entries(found.config)[0]
        said = str(error).partition("\n")[0].rstrip(":")
        found.findings.append(Finding("quantization", ERROR, said, f"remove {entry}", True, (entry,)))
        del found.config[entry]
        found.changes.append(f"config.json: {entry} removed")


def _names_and_shapes(
    found: Examination, names: Mapping[str, str], options: Options
) -> tuple[list[Finding], list[str], dict[str, Any]]:
    """Plan with the config as it is now: findings, changes, and entries of the config that fit better."""
    checkpoint, entries = found.checkpoint, found.config
    is_composite = str(entries.get("model_type")) in COMPOSITES
    if is_composite or quantized_entries(entries):
        problem = _problem_as_it_is(found, names, options)
        if problem is None or is_composite:
            return [] if problem is None else [of_error(problem)], [], {}
    whole = layouts_as_it_is(checkpoint, entries, names, options.family)
    try:
        with quiet():
            layouts = _layouts(found, names, options) if whole is None else _with_named_class(found, whole)
    except ConversionError as error:
        return [of_error(error)], [], {}
    found.layouts = layouts
    plain = Unwrapped({name: name for name in names}) if whole is not None else unwrapped([*names], layouts.known)
    own = {name: names[old] for name, old in plain.names.items()}
    headers: dict[str, TensorInfo] = {name: checkpoint.tensors[old] for name, old in own.items()}
    findings, changes = list(plain.findings), list(plain.changes)
    groups = [copy_of(name, header) for name, header in headers.items() if name in layouts.released]
    elsewhere = {name: each for name, each in headers.items() if name in layouts.known and name not in layouts.released}
    try:
        moved = layouts.groups_to_released(elsewhere)
    except ConversionError as error:
        findings.append(Finding("layout", ERROR, f"names of another layout that do not belong together: {error}"))
        moved = []
    filled = targets_of(groups).keys()
    moved = [group for group in moved if not filled & {target.name for target in group.targets}]
    read = {name for group in moved for name in group.sources}
    if moved:
        findings.append(of_layout(moved))
        changes.append(f"{len(read)} tensors written in the released layout, {example(moved)}")
    groups += moved
    filled = targets_of(groups).keys()
    unknown = {name: each for name, each in headers.items() if name not in layouts.released and name not in read}
    missing = {
        name: shape for name, shape in layouts.released.items() if name not in filled and name not in layouts.optional
    }
    heads = getattr(layouts.config, "num_key_value_heads", None)
    joined = split_joined(unknown, missing, heads, options.qkv, options.gate_up)
    findings += joined.findings
    groups += joined.groups
    changes += [f"{len(joined.groups)} joined matrices split"] if joined.groups else []
    unknown = {name: each for name, each in unknown.items() if name not in joined.joined}
    missing = {name: shape for name, shape in missing.items() if name not in joined.filled}
    groups = with_sources(groups, own)
    groups, of_lora, of_merge = merged(groups, plain.lora, names, checkpoint, options)
    findings += [*of_lora, *(checkpoint.untied(layouts.tied) if isinstance(checkpoint, WithAdapter) else ())]
    changes += of_merge
    kept = with_sources([copy_of(name, header) for name, header in unknown.items()], own)
    found.groups = _cast([*groups, *kept], options.dtype)
    if options.dtype is not None:
        changes.append(f"cast to {options.dtype}")
        found.config[dtype_entry(entries)] = options.dtype
    missing |= missing_ties(layouts, {*filled, *joined.filled})
    fits = _check(found, options, layouts, findings, unknown, missing)
    return findings, changes, fits


def _problem_as_it_is(found: Examination, names: Mapping[str, str], options: Options) -> ConversionError | None:
    """Why quantized weights, or a text next to other towers, do not convert as they are; None: nothing is changed."""
    copies = (copy_of(name, found.checkpoint.tensors[own]) for name, own in names.items())
    found.groups = with_sources(copies, names)
    try:
        found.make_plan(options.family)
    except ConversionError as error:
        found.groups = []
        return error
    found.is_whole = True
    return None


def _layouts(found: Examination, names: Mapping[str, str], options: Options) -> Layouts:
    """The layouts; where `architectures` names an unknown class, by the class that the tensors show."""
    checkpoint, entries = found.checkpoint, found.config
    try:
        plain = layouts_of(entries, options.family, names, lambda name: checkpoint.read(names[name]))
        if {*names} <= plain.known:
            return _with_named_class(found, plain)
    except ConversionError:
        pass  # no layout has these names yet
    known = unwrapped([*names], all_names(entries, options.family))
    todays = [*known.names]

    def read(name: str) -> torch.Tensor:
        return checkpoint.read(names[known.names[name]])

    layouts = None
    try:
        layouts = layouts_of(entries, options.family, todays, read)
        if entries.get("architectures") and not {*todays} <= layouts.known:
            with suppress(ConversionError):
                shown_ones = layouts_of({**entries, "architectures": None}, options.family, todays, read)
                layouts = shown_ones if {*todays} <= shown_ones.known else layouts
    except ConversionError as error:
        if not entries.get("architectures") or "architectures" not in str(error):
            raise
        without = {name: value for name, value in entries.items() if name != "architectures"}
        with suppress(ConversionError):
            layouts = layouts_of(without, options.family, todays, read)
        if layouts is None or layouts.variant is None or "tie_word_embeddings" in str(error):
            raise error from None
    return _with_named_class(found, layouts)


def _with_named_class(found: Examination, layouts: Layouts) -> Layouts:
    """The layouts; `architectures` becomes the class that they are of, where it names another."""
    entries = found.config
    head = layouts.head
    is_other = head is not None and entries.get("architectures") not in (None, [], [head])
    if is_other and not _has_named_class(found, layouts):
        said = f"config.json: architectures is {json.dumps(entries['architectures'])}, and the tensors belong to {head}"
        found.findings.append(Finding("architectures", WARNING, said, f'write "architectures": ["{head}"]', True))
        found.changes += entries_set({"architectures": [head]})
        found.config["architectures"] = [head]
    return layouts


def _has_named_class(found: Examination, layouts: Layouts) -> bool:
    """Whether the file has all weights of the class that `architectures` names, and others: BERT's two heads, say."""
    family = layouts.family
    if family is None:
        return False
    named, held = family.names.named(found.config), family.names.in_class(found.checkpoint.tensors)
    if named[0] == layouts.head:  # by another name, of the source's own code or of a wrapper
        return bool(found.config.get("auto_map"))
    return any(head.official == named[0] and head.has_tensors_in(held) for head in family.heads)


def _check(
    found: Examination,
    options: Options,
    layouts: Layouts,
    findings: list[Finding],
    unknown: Mapping[str, TensorInfo],
    missing: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Plan the conversion of what would be written. Returns entries of the config with which it fits."""
    if layouts.family is None:
        misfits = wrong_shapes(found.groups, layouts.released)
        found.is_whole = not (unknown or missing or misfits)
        findings += [*of_names(unknown, missing), *misfits]
        return {}
    reason: ConversionError | None = None
    try:
        found.make_plan(options.family)
        found.is_whole = True
    except MisfitError as error:
        if error.fits:
            return error.fits
        reason = error
    except ConversionError as error:
        reason = error
    if found.plan is None:
        misfits = of_another_family(found.checkpoint.tensors, unknown, layouts.family.name)
        if misfits:
            findings[:] = [each for each in findings if each.kind not in ("layout", "prefix", "fused")]
            found.findings = [each for each in found.findings if each.kind != "architectures"]
            found.changes.clear()
        strange = foreign(found.written, unknown, options.family)
        misfits = misfits or [*of_names(strange, missing), *wrong_shapes(found.groups, layouts.released)]
        findings += misfits
        is_told = misfits or any(each.is_open for each in findings)
        findings += [] if is_told or reason is None else [of_error(reason)]
    elif unknown:
        said = f"{counted(len(unknown), 'tensor')} {are(unknown)} not part of the model and can stay"
        names = tuple(unknown)[:3]
        findings.append(Finding("unused", NOTE, f"{said} ({shown(names[0])})", names=names))
    return {}


def _cast(groups: list[Group], dtype: str | None) -> list[Group]:
    if dtype is None:
        return groups
    kind = getattr(torch, dtype)

    def target(each: Target) -> Target:
        return Target(each.name, kind, each.shape) if each.dtype.is_floating_point else each

    return [Group(group.sources, tuple(map(target, group.targets)), group.op) for group in groups]
