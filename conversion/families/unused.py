"""Which entries of an official `config.json` change nothing, found by building the official config without them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError, shown
from blockformer.files.quiet import quiet
from blockformer.model.axes import did_you_mean

from ..values import DROPOUTS

NOT_MISSPELT = (
    *("classif_dropout", "eos_token_ids", "static_position_embeddings", "num_decoder_layers"),
    *("bos_token", "eos_token", "mask_token", "pad_token"),
    *("intermediate_size", "moe_intermediate_size", "use_sliding_window", "time_step_min"),
    *("tie_encoder_decoder", "is_decoder"),
)
"""Entries that earlier releases, tokenizers and other families' classes wrote into many configs."""

Build = Callable[[Mapping[str, Any]], PretrainedConfig]


def without_effect(build: Build, official: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The names, out of some, of entries from which the official class makes nothing but an attribute of that name.

    An entry may have the value that the class takes anyway, so another value is tried too. Names are tried together
    and then by halves, since nearly always none has an effect: a config with thousands of them takes a few builds.

    Args:
        build: makes the official config of entries.
        official: the entries.
        names: the ones to try.
    """
    rest = {name: value for name, value in official.items() if name not in names}
    with quiet(errors=True):
        try:
            before = build(rest).to_dict()
        except ConversionError:  # of another family than the checkpoint's: nothing is known
            return list(names)

        def act(tried: Sequence[str]) -> list[str]:
            given = {name: official[name] for name in tried}
            other = {name: _other(value) for name, value in given.items()}
            if not any(_differs(build, {**rest, **each}, before, given) for each in (given, other)):
                return []
            middle = len(tried) // 2
            return list(tried) if len(tried) == 1 else [*act(tried[:middle]), *act(tried[middle:])]

        used = {*act(names)} if names else set()
    return [name for name in names if name not in used]


def _differs(build: Build, entries: Mapping[str, Any], before: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    try:
        after = build(entries).to_dict()
    except ConversionError:  # the class reads the entry, and refuses its value
        return True
    return any(after.get(name) != before.get(name) for name in {*after, *before} - {*own})


def _other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return 1 if value is None else value


def other_dropouts(
    fields: Mapping[str, Sequence[str]], defaults: PretrainedConfig, official: Mapping[str, Any]
) -> list[str]:
    """Dropouts that differ from another official one of the same Blockformer field, which stands for both.

    Args:
        fields: official field -> ours.
        defaults: the official config where nobody says anything.
        official: the entries.
    """
    first: dict[str, Any] = {}
    other = []
    for theirs, (name, *_) in fields.items():
        if name in DROPOUTS:
            value = official.get(theirs, getattr(defaults, theirs)) or 0.0
            if first.setdefault(name, value) != value:
                other.append(theirs)
    return other


def note_on(names: Sequence[str], fields: Mapping[str, Any], family: str, only_misspelt: bool) -> list[str]:
    """A note on entries that change nothing, with the official field whose name is nearly theirs; or no note.

    Args:
        names: of the entries.
        fields: of the official class.
        family: its name.
        only_misspelt: leave out entries that are like no field.
    """
    told = []
    for name in names:
        is_known = name in fields or name in NOT_MISSPELT
        hint = "" if is_known else did_you_mean(name, fields, cutoff=0.85).replace(" Did", "did")
        if hint or not only_misspelt:
            told.append(shown(name) + (f" ({hint})" if hint else ""))
    return [f"config.json: settings that {family} does not use: {', '.join(told)}"] if told else []
