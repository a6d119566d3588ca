"""A model written as training code reads it: the rules of `own_code.py` the other way, then read again and compared."""

import json
import re
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from blockformer.conversion.plan import plan_out
from blockformer.conversion.rules.groups import Group, targets_of
from blockformer.conversion.rules.in_turn import in_turn
from blockformer.conversion.rules.patterns import tuple_of
from blockformer.conversion.rules.table import RuleTable
from blockformer.files.atomic import atomic_folder
from blockformer.files.config_file import is_ours
from blockformer.files.errors import ConversionError, listed, memory_errors, shown
from blockformer.files.json_files import json_text
from blockformer.files.progress import Progress, silent
from blockformer.files.quiet import quiet
from blockformer.files.safetensors_io import same_bits

from .diagnosing import diagnosis_of, examined
from .examination import Examination
from .known_codes import code_named
from .mending import check_mendable, copy_side_files
from .options import Options
from .own_code import CONFIG, Model, OwnCode, model_of, said

WEIGHTS_KEY = "model"
"""The key of the weights in a pickled file that holds settings too."""
NOT_COMPUTED = re.compile(
    r"architectures|dtype|transformers_version|model_type|tie_word_embeddings|initializer_range|use_cache|.*_token_id|"
    r".*dropout|_name_or_path|id2label|label2id"
)
"""Fields that do not change what is computed, and that training code keeps elsewhere or nowhere."""


def write_for(
    source: str | PathLike[str],
    target: str | PathLike[str],
    code: str,
    *,
    force: bool = False,
    progress: Progress | None = None,
    **reading: Any,
) -> list[str]:
    """Write a model as training code reads it: its weights, their settings, the tokenizer.

    Memory: the whole model, since `torch.save` takes it so. What is written is read again and compared, bit for bit,
    before the folder appears.

    Args:
        source: a folder, a file with weights, or a Hub id: in an official layout, in ours, or of other training code.
        target: the folder to create.
        code: whose: "litgpt", ...
        force: replace a folder that Blockformer made, if nobody changed it.
        progress: receives progress reports.
        reading: for a Hub id; see `diagnose`.

    Returns:
        What was written, in sentences.

    Raises:
        ConversionError: the source is not whole, or the code has no place for something of it. Nothing is written then.
    """
    own, report = code_named(code), progress or silent
    with memory_errors(), examined(source, None, Options(), **reading) as (found, _):
        check_mendable(diagnosis_of(source, found, None, None, True, report), f"written for {own.name}")
        groups, entries, model = _official(found, own)
        rules = RuleTable(own.rules(model, ()))
        named = {name for rule in rules.rules for name in tuple_of(rule.target)}
        written = _without_fillings(own, groups, found, named)
        planned = in_turn(written, rules.plan(targets_of(written), reverse=True))
        origins = [found.checkpoint.file or found.checkpoint.folder]
        with atomic_folder(target, force, origins) as folder:
            weights: dict[str, Tensor] = {}
            for index, group in enumerate(planned):
                weights |= group.apply(found.checkpoint.read)
                report("reading the weights", index + 1, len(planned))
            weights |= {} if own.adds is None else own.adds(model)
            _write(own, model, weights, folder)
            if own.key == CONFIG:  # with no more than the user would say, so that the comparison sees all else
                said_of_it = own.back(model) if own.back is not None else {}
                (folder / CONFIG).write_text(json_text(said_of_it or entries), encoding="utf-8")
            _compare(own, model, groups, found, folder)
            (folder / CONFIG).write_text(json_text(entries), encoding="utf-8")
            copied = copy_side_files(found, folder, Options())
        found.checkpoint.check_unchanged()
    return [f"{len(weights)} tensors written for {own.name}, read again and compared", *copied]


def _official(found: Examination, own: OwnCode) -> tuple[list[Group], dict[str, Any], Model]:
    """The groups that make the tensors the code's rules know, the `config.json` of them, and the model."""
    if found.layouts is None:
        raise ConversionError(f"{found.checkpoint.folder}: quantized weights are not written for {own.name}")
    groups, entries, model = found.groups, found.config, model_of(found.layouts)
    ties: Mapping[str, str] = found.layouts.tied
    if is_ours(entries) and None not in own.families:
        with quiet():
            plan = plan_out(found.written, None, None)
        groups, entries = in_turn(groups, plan.groups), json.loads(plan.config_json)
        model = Model(plan.family.name, plan.source_config)
    if model.family not in own.families:
        known = ", ".join(each or "Blockformer's" for each in own.families)
        raise ConversionError(f"{own.name} has no model of the family {model.family!r}; it has {known}")
    named = {name for rule in own.rules(model, ()) for name in tuple_of(rule.target)}
    copies = [group for group in _copies(groups, ties) if group.targets[0].name in named]
    return groups + copies, entries, model


def _without_fillings(own: OwnCode, groups: list[Group], found: Examination, named: Collection[str]) -> list[Group]:
    """The groups without tensors that the code may do without and that make no difference.

    Args:
        own: the code.
        groups: of the model.
        found: whose tensors they read.
        named: what the code's rules have a place for.

    Raises:
        ConversionError: one without a place makes a difference.
    """
    if None not in own.families:
        return groups
    fillings: dict[str, list[Group]] = {"plain": [], "named": [], "wrong": []}
    left = []
    for group in groups:
        name = group.targets[0].name
        value = own.filling(name)
        if value is None:
            left.append(group)
            continue
        is_plain = all(bool((tensor == value).all()) for _, tensor in group.apply(found.checkpoint.read))
        fillings["plain" if is_plain else "named" if name in named else "wrong"].append(group)
    if fillings["wrong"]:
        wrong = [group.targets[0].name for group in fillings["wrong"]]
        raise ConversionError(f"{own.name} has no place for weights of this model:{listed(map(shown, wrong))}")
    if fillings["named"]:  # one layer has such weights, so all have
        left += fillings["named"] + [group for group in fillings["plain"] if group.targets[0].name in named]
    return left


def _copies(groups: list[Group], ties: Mapping[str, str]) -> list[Group]:
    """Groups for tied tensors that are stored once, where the code has two."""
    made = {target.name: group for group in groups for target in group.targets}
    pairs = [*ties.items(), *((source, name) for name, source in ties.items())]
    return [
        made[source].renamed(lambda _, name=name: name)
        for name, source in pairs
        if name not in made and source in made and len(made[source].targets) == 1
    ]


def _write(own: OwnCode, model: Model, weights: dict[str, Tensor], folder: Path) -> None:
    """Write weights and settings in the code's way."""
    settings = None if own.back is None or own.key == CONFIG else own.back(model)
    place = folder / own.file
    if not place.suffix:
        from torch.distributed import checkpoint as distributed  # takes long to import

        with quiet():
            distributed.save(weights, checkpoint_id=place, no_dist=True)
    elif "." in own.key or settings is None:
        torch.save(weights, place)
    else:
        torch.save({WEIGHTS_KEY: weights, own.key: settings}, place)
    if settings is not None and "." in own.key:
        path = folder / own.key.replace("*", place.stem.rpartition("_")[2])
        settings = {own.within: settings} if own.within else settings
        text = yaml.safe_dump(settings) if path.suffix == ".yaml" else json.dumps(settings, indent=2)
        path.write_text(text, encoding="utf-8")


def _compare(own: OwnCode, model: Model, groups: list[Group], source: Examination, folder: Path) -> None:
    """Read what was written as a source, and compare settings and tensors.

    Raises:
        ConversionError: it is not the same model: the code has no place for a setting.
    """
    with examined(folder, None, Options()) as (found, _):
        if found.layouts is None or not found.is_whole:
            why = "; ".join(each.remedy or each.sentence for each in found.findings)
            raise ConversionError(f"{own.name} has no model that computes the same: {why}")
        have, want = (_computed(config) for config in (model_of(found.layouts).config, model.config))
        lines = [
            f"{name} is {said(value)}, and {said(have.get(name))} there"
            for name, value in want.items()
            if have.get(name) != value
        ]
        if lines:
            raise ConversionError(f"{own.name} has no place for settings of this model:{listed(lines)}")
        back = {target.name: group for group in found.groups for target in group.targets}
        for group in groups:
            for name, tensor in group.apply(source.checkpoint.read):
                other = dict(back[name].apply(found.checkpoint.read))[name] if name in back else None
                if other is None or not same_bits(tensor, other):
                    raise ConversionError(f"{folder}: {name} is not what was to be written")


def _computed(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if not NOT_COMPUTED.fullmatch(name)}
