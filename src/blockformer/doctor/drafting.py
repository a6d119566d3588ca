"""A draft of a file of names for weights of unknown code: what shapes and names tell, and a question for all else.

A question is a text that begins with `?` in place of an answer. A file that has one is refused, so a draft that nobody
has read makes no model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from blockformer.conversion.families.registry import FAMILIES, Family, family_by_name
from blockformer.files.errors import ConversionError, shown
from blockformer.files.quiet import quiet

from .any_checkpoint import AnyCheckpoint
from .diagnosing import place_of
from .draft_matching import (
    BIAS,
    LAYER,
    WEIGHT,
    AmbiguousSizes,
    Choice,
    Match,
    Slot,
    Sources,
    match,
    order_in,
    sources_of,
)
from .finding import counted
from .known_codes import code_of
from .layouts import Layouts, layouts_of
from .name_map import QUESTION
from .options import Options
from .prefixes import unwrapped
from .renames import asked_names

USUAL = ("llama", "qwen2", "qwen3", "olmo2", "starcoder2", "gpt_neox", "gptj", "phi", "gpt2", "opt", "bert")
"""Families that are tried where none is named."""
APART = {"V": 97, "C": 24, "I": 58, "P": 89, "L": 2, "heads": 4, "kv heads": 2}
"""Sizes of a model in which no two axes of different kinds are equal."""
NAMED = {
    "V": "vocab_size",
    "C": "hidden_size",
    "I": "intermediate_size",
    "P": "max_position_embeddings",
    "L": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv heads": "num_key_value_heads",
    "D": "head_dim",
}
"""A size -> our field."""
OTHERWISE = {"C": "n_embd", "I": "n_inner", "P": "n_positions", "L": "n_layer", "heads": "n_head"}
"""A size -> what a config that has none of our fields may call it."""
OF_TRAINING = ("dropout", "initializer", "use_cache", "pdrop", "init_std")
THREE = "3C"
"""The size of a matrix of queries, keys and values."""
HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Outline:
    """A family's model whose axes are named.

    Attributes:
        family: its record.
        layouts: of the small model.
        flags: settings of the small model that add biases.
        outside, of_layer: its tensors.
    """

    family: Family
    layouts: Layouts
    flags: dict[str, Any]
    outside: list[Slot]
    of_layer: list[Slot]


def draft(
    source: str | PathLike[str],
    target: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    *,
    options: Options | None = None,
    **reading: Any,
) -> list[str]:
    """Write a draft of a file of names, in which all that shapes and names do not tell is a question.

    Args:
        source, against, reading: see `diagnose`.
        target: the JSON file to create.
        options: `family`, unless the config or `against` says it; `settings`: entries that are known.

    Returns:
        What was found out, in sentences.

    Raises:
        ConversionError: there is such a file; the family is not known, or the tensors are not a model of it.
    """
    path, choices = Path(target), options or Options()
    if path.exists():
        raise ConversionError(f"{path} is already there: name another file for the draft, or remove it")
    family = choices.family
    if family is None and against is not None:
        other = AnyCheckpoint(place_of(against))
        with other:
            family = other.config.get("model_type")
    checkpoint = AnyCheckpoint(place_of(source, **reading), key=choices.key)
    with checkpoint:
        headers = checkpoint.tensors
        if not headers:
            wrong = [each.sentence for each in checkpoint.findings if each.kind != "config"]
            raise ConversionError("; ".join(wrong) or f"{source}: no weights")
        names = asked_names(headers, choices.renames, choices.dropped)
        plain = unwrapped([*names], ()).names
        if (code := code_of({name: headers[names[old]] for name, old in plain.items()}, checkpoint)) is not None:
            raise ConversionError(f"this is a checkpoint of {code.name}, which needs no file of names: --mend reads it")
        family = family or checkpoint.config.get("model_type")
        sources = sources_of({name: tuple(headers[names[old]].shape) for name, old in plain.items()})
    if not family:
        raise ConversionError(_which_family(sources, choices))
    outline, matched = _matched(family_by_name(str(family)), sources, choices)
    content = _content(outline, matched, sources, choices)
    path.write_text(_text(content), encoding="utf-8")
    return _said(path, content, matched, outline)


def _which_family(sources: Sources, choices: Options) -> str:
    fitting = []
    for name in USUAL:
        try:
            _matched(FAMILIES[name], sources, choices)
        except AmbiguousSizes:
            pass
        except ConversionError:
            continue
        fitting.append(name)
    said = "shapes do not show the family whose formulas are yours: name it with --family"
    if not fitting:
        return f"{said}; of the usual ones none has such tensors ({', '.join(USUAL)})"
    return f"{said}; {' or '.join(fitting)} would have such tensors"


def _matched(family: Family, sources: Sources, choices: Options) -> tuple[Outline, Match]:
    """The family's model with the biases that these tensors need, and what each of them may be."""
    official = _official_names(family)
    known = {size: choices.settings[name] for size, name in official.items() if name in choices.settings}
    for flags in ({}, {"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}):
        if not {*flags} <= {*family.settings.meanings}:
            continue
        outline = _outline(family, flags)
        try:
            found = match(sources, outline.outside, outline.of_layer, {n: v for n, v in known.items() if n in "CIPV"})
        except AmbiguousSizes as error:
            open_ = {official[size]: each for size, each in error.values.items() if size in official and len(each) > 1}
            told = ", ".join(f"{name} {' or '.join(map(str, each))}" for name, each in open_.items())
            asked = next((f"; say which: --set {name}={each[0]}" for name, each in open_.items()), "")
            error.args = (f"the shapes fit with several sizes: {told}{asked}",)
            raise
        if found is not None:
            return outline, found
    raise ConversionError(
        f"the tensors do not fit a {family.name}, neither one by one nor transposed or joined: "
        "try another --family, or write the file of names by hand"
    )


def _official_names(family: Family) -> dict[str, str]:
    """A size -> the field of the family's config."""
    theirs = {ours[0]: name for name, ours in family.settings.meanings.items()}
    default = family.settings.defaults.to_dict()
    named = {size: theirs.get(field) or OTHERWISE.get(size, field) for size, field in NAMED.items()}
    return {size: name for size, name in named.items() if name in default}


def _outline(family: Family, flags: Mapping[str, Any]) -> Outline:
    """The family's small model.

    Raises:
        ConversionError: it has no such model.
    """
    names = _official_names(family)
    entries = {name: APART[size] for size, name in names.items() if size in APART}
    entries |= {name: None for name in family.settings.meanings if name.endswith("_token_id")}
    entries |= {"model_type": family.settings.model_type, **flags}
    entries |= {"tie_word_embeddings": False} if "tie_word_embeddings" in family.settings.meanings else {}
    sizes = {APART[size]: size for size in "VCIP"} | {3 * APART["C"]: THREE, 6: "D", 12: "K"}
    attempts = [(entries, sizes)]
    if "D" in names:  # a head may have its own size
        attempts.insert(0, ({**entries, names["D"]: 8}, {**sizes, 8: "D", 16: "K", 32: "Q"}))
    for asked, known in attempts:
        try:
            with quiet():
                layouts = layouts_of(asked, family.name)
        except ConversionError as error:
            refused = error
            continue
        slots = [
            Slot(
                name.replace(".0.", f".{LAYER}.", 1),
                tuple(known.get(size, str(size)) for size in shape),
                f"{name.removesuffix(WEIGHT)}{BIAS}" in layouts.released,
            )
            for name, shape in layouts.released.items()
            if ".1." not in name
            and not (name.endswith(BIAS) and f"{name.removesuffix(BIAS)}{WEIGHT}" in layouts.released)
        ]
        outside = [slot for slot in slots if LAYER not in slot.name]
        return Outline(family, layouts, dict(flags), outside, [slot for slot in slots if slot not in outside])
    raise refused


def _content(outline: Outline, found: Match, sources: Sources, choices: Options) -> dict[str, Any]:
    """The file: the config, an entry for each tensor, and the tensors that the code does without."""
    shapes: dict[str, tuple[int, ...]] = {**sources.outside, **sources.of_layer}
    is_rotary = getattr(outline.layouts.config, "position_type", "") == "rotary"
    tensors = [_entry(name, each, shapes.get(name, (0,)), is_rotary) for name, each in found.choices.items()]
    tensors += [[[], slot.name, {"constant": 0}] for slot in found.zero]
    dropped = [_asked(f"{name}, if your code computes it again") for name in sources.computed]
    content = {"config": _config(outline, found, sources, choices), "tensors": tensors}
    return content | ({"drop": dropped} if dropped else {})


def _entry(name: str, choices: list[Choice], shape: tuple[int, ...], is_rotary: bool) -> list[Any]:
    if not choices:
        return [
            name,
            _asked("no tensor of the family has this shape: name it in drop, if the model does without it"),
        ]
    turned = {each.is_turned for each in choices}
    steps: list[Any] = ["squeeze"] if len([size for size in shape if size != 1]) != len(shape) else []
    if len(turned) > 1:
        steps.append(_asked("transpose, or remove this"))
    elif True in turned:
        steps.append("transpose")
    if len({each.names for each in choices}) > 1:
        return [name, _asked(" or ".join(dict.fromkeys(" with ".join(each.names) for each in choices))), *steps]
    names = choices[0].names
    if any(size == THREE for size in choices[0].slots[0].sizes):
        return [name, names[0], *steps, _asked(IN_ORDER)]
    if len(names) == 1:
        turns = is_rotary and names[0].rpartition(".")[0].endswith(("q_proj", "k_proj"))
        return [name, names[0], *steps, *([_asked(f"{PAIRS}, or remove this")] if turns else [])]
    said = order_in(name)
    names = tuple(sorted(names, key=lambda each: said.find(each.partition("_proj")[0][-1]))) if said else names
    return [name, [*names], *steps, *_of_joined(names, is_rotary)]


IN_ORDER = (
    "remove this if the queries, keys and values in it lie as in the family; no operation puts another order right, "
    "and a family that has them apart takes any"
)
PAIRS = "pairs-to-halves if the rotated pairs lie side by side in each head"


def _of_joined(names: tuple[str, ...], is_rotary: bool) -> list[Any]:
    """The questions on a matrix of several."""
    if any("gate" in each for each in names):
        return [_asked("split if the rows of the first name come first; else exchange the names, and split")]
    parts = "queries, keys and values" if len(names) == 3 else "keys and values"
    order = "in the order of the names here"
    said = f'split if all {parts} lie one after the other {order}, or {{"split": {{"groups": HEADS}}}} if head by head'
    turned = ", ".join("null" if "v_proj" in each else '"pairs-to-halves"' for each in names)
    of_pairs = f'{{"each": [{turned}]}} if rotated pairs lie side by side in each head, or remove this'
    return [_asked(said), *([_asked(of_pairs)] if is_rotary else [])]


def _asked(text: str) -> str:
    return f"{QUESTION} {text}"


def _config(outline: Outline, found: Match, sources: Sources, choices: Options) -> dict[str, Any]:
    """Sizes that the shapes show, and a question for each other field."""
    settings, names = outline.family.settings, _official_names(outline.family)
    sizes = {**found.sizes, "L": sources.layers}
    entries: dict[str, Any] = {"model_type": settings.model_type}
    entries |= {name: sizes[size] for size, name in names.items() if size in sizes}
    query, key = sizes.get("Q", sizes["C"]), sizes.get("K")
    heads = [query // size for size in HEAD_SIZES if query % size == 0 and (key or query) % size == 0]
    if size := sizes.get("D"):
        entries |= {names["heads"]: query // size} | ({names["kv heads"]: key // size} if key else {})
    else:
        few = f" (with heads of the usual sizes: {' or '.join(map(str, heads))})" if heads else ""
        entries[names["heads"]] = _asked(f"the number of heads{few}")
        if key and "kv heads" in names:
            part = "the number in" if key == query else f"1/{query // key} of"
            entries[names["kv heads"]] = _asked(f"{part} {names['heads']}")
        if "D" in names and (query != sizes["C"] or settings.defaults.to_dict().get(names["D"]) is not None):
            entries[names["D"]] = _asked(f"{query} divided by {names['heads']}")
    defaults = settings.defaults.to_dict()
    known = {*entries, names.get("D")}
    asked = [name for name in settings.meanings if name not in known and not any(each in name for each in OF_TRAINING)]
    has_head = not found.free
    for name in asked:
        if name in outline.flags:
            entries[name] = outline.flags[name]
        elif name in ("attention_bias", "mlp_bias") or (name == "tie_word_embeddings" and has_head):
            entries[name] = False
        elif name == "tie_word_embeddings":
            entries[name] = _asked("true if the embeddings are the head; the file has no other")
        elif name.endswith("_token_id"):
            entries[name] = _asked("an id, or null")
        else:
            entries[name] = _asked(f"{json.dumps(defaults.get(name))} in the family; what your code has")
    if getattr(outline.layouts.config, "position_type", "") == "rotary":
        entries["rope_theta"] = _asked("10000.0 in most code; the base of the rotation")
    return {**entries, **choices.settings}


def _text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry."""
    config = json.dumps(content["config"], indent=2).replace("\n", "\n  ")
    lines = ",\n    ".join(json.dumps(each) for each in content["tensors"])
    drop = f',\n  "drop": {json.dumps(content["drop"])}' if "drop" in content else ""
    return f'{{\n  "config": {config},\n  "tensors": [\n    {lines}\n  ]{drop}\n}}\n'


def _said(path: Path, content: Mapping[str, Any], found: Match, outline: Outline) -> list[str]:
    open_ = [name for name, each in found.choices.items() if len({choice.names for choice in each}) != 1]
    known = [name for name in found.choices if name not in {*open_, *found.by_name}]
    entries = [*content["tensors"], *content["config"].values(), *content.get("drop", ())]
    questions = sum(f'"{QUESTION}' in json.dumps(each) for each in entries)
    defaults = outline.family.settings.defaults.to_dict()
    usual = [name for name, each in sorted(defaults.items()) if name not in content["config"] and _is_number(each)]
    return [
        f"{path}: a draft for {outline.family.name}, with questions in {counted(questions, 'entry', 'entries')}",
        f"known by their shapes: {', '.join(map(shown, known)) or 'none'}",
        f"known by their names: {', '.join(map(shown, found.by_name)) or 'none'}",
        f"not known: {', '.join(map(shown, open_)) or 'none'}",
        f"what its config does not name stays as is usual in the family: {', '.join(usual[:12]) or 'nothing'}",
        f"each text that begins with {QUESTION} is a question: put the answer in its place, then run --map {path}",
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(value)
