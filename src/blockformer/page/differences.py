"""What of a model's boxes is not as in a reference."""

from typing import Any

from ..pictures.anatomy import Box
from .facts import Facts
from .fields import SIZES, fields_of, plain

# What a token looks at, by the mask of its attention.
_SIGHT = {
    "both": "both ways",
    "causal": "back only",
    "window": "both ways in a window",
    "causal_window": "back only, in a window",
    "cross": "the source",
}


def differences(ours: Facts, theirs: Facts, name: str) -> dict[str, Any]:
    """The boxes that are built in another way, and how, in words; sizes apart.

    A stack is compared with the reference's stack of its name or, where that has none such, with its last one.

    Returns:
        `boxes`: a box's path -> sentences, `rows` of them with the boxes' titles, `missing`: titles of the reference's
        boxes that are not here, `sizes`: fields with both values.
    """
    reference = _by_role(theirs)
    sides = {stack.name for stack in theirs.parts.stacks}
    last = theirs.parts.stacks[-1].name
    boxes: dict[str, list[str]] = {}
    rows: dict[str, list[str]] = {}
    seen: set[str] = set()
    for box in ours.parts.boxes():
        side, _, rest = box.role.partition(".")
        role = box.role if side in sides or side == "head" else f"{last}.{rest}"
        seen.add(role)
        candidates = reference.get(role, [])
        words = [_compared(box, other, ours, theirs, name) for other in candidates]
        # Of several kinds of layers it is the reference's if it is like one of them.
        found = min(words, key=len) if words else [f"{name} has none here."]
        if found:
            boxes[box.path] = found
            known = rows.setdefault(_place(box), [])
            known += [line for line in found if line not in known]
    missing = [_place(options[0]) for role, options in reference.items() if role not in seen]
    told = [[title, " ".join(lines)] for title, lines in rows.items()]
    return {"name": name, "boxes": boxes, "rows": told, "missing": missing, "sizes": _sizes(ours, theirs)}


def _by_role(facts: Facts) -> dict[str, list[Box]]:
    roles: dict[str, list[Box]] = {}
    for box in facts.parts.boxes():
        roles.setdefault(box.role, []).append(box)
    return roles


def _place(box: Box) -> str:
    """A box's title and where it stands."""
    side, *rest = box.role.split(".")
    words = {"self_attn": "self-attention", "cross_attn": "cross-attention", "mlp": "feed-forward"}
    slots = {
        "input_norm": "at the entrance of",
        "pre_norm": "before",
        "output_norm": "after",
        "post_norm": "after the sum of",
    }
    place = f" {slots[rest[1]]} {words[rest[0]]}" if len(rest) == 2 else ""
    return f"{box.title}{place}{'' if side == 'head' else f', {side}'}"


def _compared(box: Box, other: Box, ours: Facts, theirs: Facts, name: str) -> list[str]:
    mine, its = fields_of(box, ours.config), fields_of(other, theirs.config)
    lines = []
    for field in dict.fromkeys((*mine, *its)):
        if field in SIZES or (field in mine) != (field in its):
            continue
        if _is_another(mine[field], its[field]):
            lines.append(f"{field} is {plain(mine[field])}, in {name} {plain(its[field])}.")
    if box.mask != other.mask:
        lines.append(f"A token looks {_SIGHT[box.mask]}, in {name} {_SIGHT[other.mask]}.")
    if box.heads and other.heads and (box.heads[0] == box.heads[1]) != (other.heads[0] == other.heads[1]):
        share = "Query heads share key/value heads", "Each query head has its own key/value head"
        lines.append(f"{share[box.heads[0] == box.heads[1]]} (num_key_value_heads), unlike in {name}.")
    if bool(box.experts) != bool(other.experts):
        what = ("one network for all tokens", "experts, of which a token passes through some")
        lines.append(f"It is {what[bool(box.experts)]} (num_experts), unlike in {name}.")
    return lines


def _is_another(mine: Any, its: Any) -> bool:
    """Whether two values are two ways to build; two numbers are two sizes."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (mine, its))
    return mine != its and not numbers


def _sizes(ours: Facts, theirs: Facts) -> list[list[str]]:
    rows = []
    for name in ("num_hidden_layers", "decoder_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "intermediate_size", "decoder_intermediate_size", "num_experts", "vocab_size",
                 "max_position_embeddings"):  # fmt: skip
        mine, its = (getattr(facts.config, name, None) for facts in (ours, theirs))
        if mine != its and (mine or its):
            rows.append([name, plain(mine), plain(its)])
    return rows
