"""Findings about names, shapes and settings, in words."""

import json
from collections.abc import Mapping
from typing import Any

from blockformer.conversion.remedies import of_shapes
from blockformer.conversion.rules.groups import Group, Target
from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.safetensors_io import HasHeader

from .finding import ERROR, WARNING, Finding, are, counted
from .renames import suggestions

NOT_BROKEN = ("settings that cannot be converted", "is not supported")
"""Words of refusals that say what Blockformer lacks, and nothing against the checkpoint."""


def of_fits(before: Mapping[str, Any], fits: Mapping[str, Any]) -> Finding:
    """Entries of `config.json` that the tensors contradict, and what they would have to be."""

    def words(entries: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} is {json.dumps(value)}" for name, value in entries.items())

    said = f"config.json: {words(before)}, and the tensors only fit if {words(fits)}"
    return Finding("config", ERROR, said, f"write {json.dumps(dict(fits))[1:-1]}", True, tuple(fits))


def of_names(unknown: Mapping[str, HasHeader], missing: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    """Tensors that the model does not know, tensors that it lacks, and which may be which."""
    findings = suggestions(unknown, missing)
    named = {name for each in findings for name in each.names}
    unknown = {name: info for name, info in unknown.items() if name not in named}
    if missing:
        said = f"{counted(len(missing), 'tensor')} of the model {are(missing)} missing:{listed(map(shown, missing), 6)}"
        fix = "transformers would draw them at random, without an error: save the whole model again, or copy the rest"
        findings.append(Finding("missing", ERROR, said, fix, names=tuple(missing)))
    if unknown:
        said = (
            f"{counted(len(unknown), 'tensor')} {are(unknown)} not part of the model:{listed(map(shown, unknown), 6)}"
        )
        fix = "if they can go: --drop NAME; if they have other names in the model: --rename OLD=NEW"
        findings.append(Finding("unknown", ERROR, said, fix, names=tuple(unknown)))
    return findings


def wrong_shapes(groups: list[Group], released: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    """Tensors of other shapes than the released ones."""
    targets = [target for group in groups for target in group.targets]
    wrong = [each for each in targets if tuple(released.get(each.name, each.shape)) != tuple(each.shape)]
    if not wrong:
        return []
    lines = (f"{shown(each.name)} is {list(each.shape)}, not {list(released[each.name])}" for each in wrong)
    verb = "has a shape" if len(wrong) == 1 else "have shapes"
    said = f"{counted(len(wrong), 'tensor')} {verb} that config.json contradicts:{listed(lines, 6)}"
    pairs = [(tuple(each.shape), tuple(released[each.name])) for each in wrong]
    names = tuple(each.name for each in wrong)
    return [Finding("shapes", ERROR, said, of_shapes(pairs) or _of_sizes(wrong), names=names)]


def _of_sizes(wrong: list[Target]) -> str:
    """What to do about shapes that show nothing by themselves."""
    rows = {each.name.rpartition(".")[0].rpartition(".")[2]: each.shape[0] for each in wrong if len(each.shape) == 2}
    if len(wrong) == 1 and any(part in name for name in rows for part in ("embed", "wte", "lm_head", "head")):
        only = next(iter(rows.values()))
        return (
            f"only one of embeddings and head was resized, to {only} rows: call resize_token_embeddings of the model, "
            "which changes both and config.json, and save again; or take the checkpoint from before"
        )
    return "correct config.json, --set NAME=VALUE, if one value fits all tensors; if none does, save the model again"


def of_layout(moved: list[Group]) -> Finding:
    """Tensors that lie there as another layout has them."""
    inner = sum(len(group.sources) for group in moved)
    is_stacked = any(len(group.targets) > len(group.sources) for group in moved)
    what = "joined, as a model in memory has them" if is_stacked else "named as in another layout"
    said = f"{inner} tensors are {what}; the released layout has {example(moved)}"
    fix = "only newer releases of transformers read them; --mend writes the released layout"
    return Finding("layout", WARNING, said, fix, True, tuple(moved[0].sources[:3]))


def example(groups: list[Group]) -> str:
    """The group that changes most, by one name before and one after."""
    group = max(groups, key=lambda each: len(each.targets) + len(each.sources))
    return f"{shown(group.targets[0].name)} for {shown(group.sources[0])}"


def of_error(error: ConversionError) -> Finding:
    """A refusal of conversion, which names the fix itself."""
    if any(words in str(error) for words in NOT_BROKEN):
        fix = "the checkpoint is not at fault: Blockformer does not convert such models"
        return Finding("unsupported", WARNING, str(error), fix)
    kind = "config" if str(error).startswith("config.json") else "tensors"
    said, mark, fix = str(error).partition(". Write ")
    return Finding(kind, ERROR, said, f"write {fix}" if mark else "")
