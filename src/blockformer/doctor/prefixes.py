"""What training frameworks put before or into the names of tensors, taken out again."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from blockformer.files.errors import shown
from blockformer.files.names import OF_PARALLEL, PARALLEL, PEFT, WRAPPERS

from .finding import ERROR, Finding

OF = {
    f"{PARALLEL}.": OF_PARALLEL,
    PEFT: "PEFT",
    "pretrained_model.": "TRL's model with a value head",
    "model.": "a class around the model, such as a LightningModule,",
    "_forward_module.": "Lightning Fabric",
}
"""Beginnings of names -> what puts them there."""
IN_ADAPTED = ("base_layer", "modules_to_save.default", "modules_to_save", "original_module")
"""Parts of names in a model that PEFT has adapted."""
LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
LONGEST = 4
"""Parts of the longest prefix that is tried."""


@dataclass
class Unwrapped:
    """Names without what wrappers put into them.

    Attributes:
        names: the name in the model -> the name in the file.
        findings: what was taken out or put in.
        changes: the same, for the list of what `mend` changes.
        lora: names of the matrices of adapters among the weights.
    """

    names: dict[str, str]
    findings: list[Finding] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    lora: list[str] = field(default_factory=list)


def unwrapped(names: Collection[str], known: Collection[str]) -> Unwrapped:
    """The names as the model has them.

    Args:
        names: in the file.
        known: the names that the model's layouts have.
    """
    lora = [name for name in names if any(part in name.split(".") for part in LORA)]
    plain, parts = _without_parts([name for name in names if name not in lora])
    known = {*known}
    head, start = _best(plain, known)
    found: dict[str, str] = {}
    result = Unwrapped(found, lora=lora)
    for name, own in plain.items():
        new = _renamed(name, head, start, known)
        if new in found:
            said = f"{shown(own)} and {shown(found[new])} are both {shown(new)} in the model"
            result.findings.append(Finding("twice", ERROR, said, "remove one of them", names=(own, found[new])))
        found.setdefault(new, own)
    for part, having in parts.items():
        said = f"names of {WRAPPERS.get(part, 'a model that PEFT has adapted')}: they have {part + '.'!r} in them"
        result.findings.append(_finding(said, "remove it from the names", having))
        result.changes.append(f"{part + '.'!r} taken out of {len(having)} names")
    if head:
        begun = tuple(name for name in plain if name.startswith(head))
        said = f"names begin with {head!r}, which {OF.get(head, 'a class around the model')} puts there"
        result.findings.append(_finding(said, "remove it from the names", begun))
        result.changes.append(f"{head!r} removed before {len(begun)} names")
    if start and start != head:
        said = f"names lack {start!r} at the beginning: only the inner part of the model was saved"
        result.findings.append(_finding(said, "put it before the names", tuple(plain)))
        result.changes.append(f"{start!r} put before {len(plain)} names")
    return result


def _finding(said: str, fix: str, names: tuple[str, ...]) -> Finding:
    return Finding("prefix", ERROR, said, f"{fix}, as --mend does, or save the model inside", True, names[:3])


def _without_parts(names: Iterable[str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Name without the parts of wrappers -> name; part -> the names that have it."""
    plain: dict[str, str] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for name in names:
        new = name
        for part in (*WRAPPERS, *IN_ADAPTED):
            if f".{part}." in f".{new}":
                new = f".{new}".replace(f".{part}.", ".").removeprefix(".")
                parts[part] = (*parts.get(part, ()), name)
        if "original_module" in parts and name in parts["original_module"]:
            continue  # the weights from before the ones in modules_to_save
        if ".modules_to_save." in name:  # an adapter may have them twice, and its base model has others
            plain[new] = name
        plain.setdefault(new, name)
    return plain, parts


def _renamed(name: str, head: str, start: str, known: Collection[str]) -> str:
    """A name without a prefix and, where it is unknown without one, with another."""
    inner = name.removeprefix(head)
    return inner if inner in known or (head and not name.startswith(head)) else start + inner


def _best(plain: Mapping[str, str], known: Collection[str]) -> tuple[str, str]:
    """The prefix to take away and the one to put there, with which most names are known; of equals the shortest."""
    heads: Counter[str] = Counter()
    for name in plain:
        pieces = name.split(".")[:-1][:LONGEST]
        heads.update(".".join(pieces[: count + 1]) + "." for count in range(len(pieces)))
    common = [head for head, count in heads.items() if 2 * count > len(plain)]
    starts = ["", *dict.fromkeys(name.partition(".")[0] + "." for name in known if "." in name)]

    def fitting(head: str, start: str) -> int:
        return sum(_renamed(name, head, start, known) in known for name in plain)

    choices = [(head, start) for head in ["", *common] for start in starts if head != start or not head]
    return max(choices, key=lambda each: (fitting(*each), -len(each[0]) - len(each[1])), default=("", ""))
