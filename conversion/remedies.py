"""What to write into a `config.json` that the tensors do not fit: tried before the error suggests it."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import LAYERS
from blockformer.files.errors import ConversionError, MisfitError
from blockformer.files.quiet import quiet

from .composite import TextCheckpoint
from .families.registry import family_by_name, family_of
from .guessing import missing_type
from .plan import Plan, plan_in

HEADS = ("num_key_value_heads", "head_dim", "num_attention_heads", "d_kv")
"""Entries of `config.json` that are lengths of tensors only as factors."""

USUAL_LABELS = 2
"""The number of labels where nobody says it."""


def plan_official(
    checkpoint: Checkpoint, family_name: str | None, cast: torch.dtype | None, dequantize: bool = False
) -> Plan:
    """See `plan_in`; where the tensors do not fit, the error says with which settings they would.

    Where `model_type` is missing, it says which families the tensors fit. The text of a composite checkpoint is
    compared with the class of the composite.
    """
    if family_name is None and not isinstance(checkpoint.config.get("model_type"), str):
        raise missing_type(checkpoint)
    try:
        plan = plan_in(checkpoint, family_name, cast, dequantize)
        return of_composite(plan, checkpoint) if isinstance(checkpoint, TextCheckpoint) else plan
    except MisfitError as error:
        for changes in _changes(checkpoint, family_name, error):
            other = copy.copy(checkpoint)
            other.config = {**checkpoint.config, **changes}
            try:
                with quiet(errors=True):
                    plan_in(other, family_name, cast, dequantize)
            except ConversionError:
                continue
            written = json.dumps(changes)[1:-1]
            raise MisfitError(
                f"{error}\nThe tensors fit if config.json has {written}.", error.shapes, changes
            ) from error
        raise


def plan_or_refer(
    checkpoint: Checkpoint, family_name: str | None, cast: torch.dtype | None, dequantize: bool = False
) -> Plan:
    """See `plan_official`; the error of tensors that do not fit ends with what their shapes show, or who says more."""
    try:
        return plan_official(checkpoint, family_name, cast, dequantize)
    except MisfitError as error:
        if error.fits:
            raise
        reason = of_shapes(error.shapes) or f"`blockformer doctor {checkpoint.folder}` says more"
        raise MisfitError(f"{error}\n{reason[0].upper()}{reason[1:]}.", error.shapes) from error


def of_shapes(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """What to do about tensors of other shapes than the model's, where these show how they came about; else None.

    Args:
        pairs: of each tensor its shape, and the one that the model has.
    """
    if pairs and all(tuple(have) == tuple(want)[::-1] for have, want in pairs):
        return "they are transposed: save the weights of nn.Linear, or transpose each with --map NAMES.json of doctor"
    if len(pairs) > 1 and len(shares := {_share(*pair) for pair in pairs}) == 1 and (count := shares.pop()) > 1:
        return (
            f"each is 1/{count} of the model's along one axis, as a process of tensor parallelism has it: gather the "
            "weights of all of them, and save again"
        )
    return None


def _share(have: Sequence[int], want: Sequence[int]) -> int:
    """How many of one shape along one axis make the other; 0 if none do."""
    axes = [(a, b) for a, b in zip(have, want, strict=False) if a != b]
    return axes[0][1] // axes[0][0] if len(have) == len(want) and len(axes) == 1 and axes[0][1] % axes[0][0] == 0 else 0


def of_composite(plan: Plan, checkpoint: TextCheckpoint) -> Plan:
    """The plan of the text of a composite checkpoint, whose own class is then the one to compare with."""
    text, notes = checkpoint.text, [checkpoint.note, *plan.notes]
    others = checkpoint.left_numbers
    return replace(plan, source_config=text.whole, source_class=text.whole_class, others=others, notes=notes)


def _changes(checkpoint: Checkpoint, family_name: str | None, error: MisfitError) -> Iterator[dict[str, Any]]:
    """Settings that may be meant: the class that the tensors show, the sizes and layers that they have, both."""
    official = checkpoint.config
    without = {name: value for name, value in official.items() if name != "architectures"}
    named: dict[str, Any] = {}
    heads_held: list[dict[str, Any]] = []
    with suppress(ConversionError):
        family = family_of(official) if family_name is None else family_by_name(family_name)
        found = family.names.in_class(checkpoint.tensors)
        held = (head.official for head in family.heads if head.rules and head.has_tensors_in(found))
        heads_held = [{"architectures": [name]} for name in dict.fromkeys(held)]
        named = {"architectures": [family.names.variant_of(without, checkpoint.tensors, checkpoint.read).head]}
    sizes = _sizes(official, error) | _layers(official, checkpoint.tensors)
    several = ({name: size} for name, size in sizes.items() if len(sizes) > 1)
    heads = _heads(official, error)
    yield from (changes for changes in (named, *several, sizes, named | sizes, *heads, *heads_held) if changes)


def _sizes(official: Mapping[str, Any], error: MisfitError) -> dict[str, int]:
    """Sizes for `config.json` that fit the tensors, in place of sizes that do not."""
    labels = official.get("id2label")
    counts = {"num_labels": len(labels) if isinstance(labels, Mapping) else USUAL_LABELS}
    counts |= {name: each for name, each in official.items() if type(each) is int and not name.endswith("_token_id")}
    pairs = {pair for have, want in error.shapes for pair in zip(have, want, strict=False) if pair[0] != pair[1]}
    return {name: have for have, want in sorted(pairs) for name, value in counts.items() if value == want}


def _heads(official: Mapping[str, Any], error: MisfitError) -> list[dict[str, int]]:
    """Entries for heads, whose number times their size is the length of a tensor -> what fits the tensors."""
    pairs = {pair for have, want in error.shapes for pair in zip(have, want, strict=False) if pair[0] != pair[1]}
    return [
        {name: value * have // want}
        for name in HEADS
        if type(value := official.get(name)) is int
        for have, want in sorted(pairs)
        if value * have % want == 0 and value * have // want > 0
    ]


def _layers(official: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """The entry for the number of layers -> that of the tensors, if it is larger."""
    numbers = {int(part) for name in names for part in name.split(".") if part.isdecimal() and len(part) < 5}
    count = max(numbers, default=-1) + 1
    return {name: count for name in LAYERS if type(official.get(name)) is int and official[name] < count}
