"""Which files of a folder hold its weights, and what kind of folder that makes it, by their names only."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from blockformer.files.containers import ADAPTERS as ADAPTER_FILES
from blockformer.files.containers import (
    NOT_WEIGHTS,
    OTHER_STATE,
    RANK,
    adapter_said,
    container_of,
    folders_with_weights,
    shard_said,
    without_model,
)
from blockformer.files.errors import CheckpointError, ConversionError, shown
from blockformer.files.names import PICKLED_SUFFIXES, WEIGHT_FILES, WEIGHTS, weight_map

from .distributed import METADATA
from .finding import ERROR, NOTE, WARNING, Finding
from .rank_files import rank_files
from .zero import zero_files, zero_folder

ADAPTER = "a LoRA adapter"
DISTRIBUTED = "a distributed checkpoint (DCP)"
RANKS = "FSDP shards"
ZERO = "the parts of DeepSpeed ZeRO"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass
class Weights:
    """The weights of a folder.

    Attributes:
        kind: how they are stored, in words.
        files: which are read, in order.
        findings: what is unusual about the files.
    """

    kind: str = "no weights"
    files: list[Path] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def weights_in(source: Path) -> Weights:
    """The weights of a folder or of a file.

    Raises:
        ConversionError: it is a file, and not one of weights.
    """
    if source.is_dir():
        found = _in_folder(source)
        found.findings += _extras(source, found)
        return found
    if source.name == METADATA or source.suffix == ".distcp":
        return Weights(DISTRIBUTED, [source.parent / METADATA], [_joined_note(DISTRIBUTED)])
    if source.suffix not in WEIGHT_FILES:
        other = container_of([source.name], source.parent)
        known = ", ".join(WEIGHT_FILES)
        what = f"{other[1]}: {other[2]}" if other else f"not a weight file; its name must end in {known}"
        raise ConversionError(f"{source}: {what}")
    if (match := RANK.fullmatch(source.name)) and not OTHER_STATE.match(source.name):
        return Weights(RANKS, [], [Finding("fsdp-shard", ERROR, *shard_said([match], source.parent))])
    kind = ADAPTER if source.name in ADAPTERS else f"one {_format(source)} file"
    return Weights(kind, [source], _adapter_finding(source.parent) if kind == ADAPTER else [])


def _in_folder(folder: Path) -> Weights:
    names = sorted(path.name for path in folder.iterdir())
    for single, index in WEIGHTS:
        if single in names:
            return Weights(f"one {_format(folder / single)} file", [folder / single])
        if index in names:
            return _of_index(folder, index)
    for name in ADAPTERS:
        if name in names:
            return Weights(ADAPTER, [folder / name], _adapter_finding(folder))
    if place := _distributed(folder):
        return Weights(DISTRIBUTED, [place / METADATA], [_joined_note(DISTRIBUTED)])
    try:
        if ranks := rank_files(folder):
            return Weights(RANKS, ranks, [_joined_note(RANKS)])
    except CheckpointError as error:
        return Weights(RANKS, [], [Finding("file", ERROR, str(error))])
    try:
        if place := zero_folder(folder):
            return Weights(ZERO, [*chain(*zero_files(place))], [_joined_note(ZERO)])
    except CheckpointError as error:
        return Weights(ZERO, [], [Finding("zero", ERROR, str(error))])
    other = container_of(names, folder)
    if other is not None and not other[0].is_pickled:
        kind, said, fix = other
        if kind.name == "zero":
            said += ", and the optim_states files are missing"
            fix = "copy them too; the model in 16 bits may be in mp_rank_00_model_states.pt: name that file"
        return Weights("no weights that libraries read", [], [Finding(kind.name, ERROR, said, fix)])
    return _unusual(folder, names)


def _of_index(folder: Path, index: str) -> Weights:
    try:
        places = weight_map(folder / index)
    except CheckpointError as error:
        return Weights("an index", [], [Finding("index", ERROR, str(error))])
    files = sorted(set(places.values()))
    missing = [name for name in files if not os.path.lexists(folder / name)]
    kind = f"{len(files)} {_format(folder / files[0])} files"
    findings = []
    if missing:
        lost = sum(file in missing for file in places.values())
        said = f"{len(missing)} of {len(files)} weight files are missing, with {lost} of {len(places)} tensors"
        findings = [Finding("shards", ERROR, said, f"copy or download {_some(missing)}", names=tuple(missing))]
    return Weights(kind, [folder / name for name in files if name not in missing], findings)


def _unusual(folder: Path, names: list[str]) -> Weights:
    """Weights under names that no library looks for."""
    safe = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(PICKLED_SUFFIXES) and not NOT_WEIGHTS.fullmatch(name)]
    found = safe or pickles
    if not found:
        return Weights()
    numbered = [re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.\w+", name) for name in found]
    if all(numbered):
        count = int(numbered[0][2]) if numbered[0] else 0
        said = "the index of the weight files is missing, and libraries find them only by it"
        findings = [Finding("index", WARNING, said, "--mend writes one", is_mended=True)]
        if count != len(found):
            said = f"{count - len(found)} of {count} weight files are missing"
            findings = [Finding("shards", ERROR, said, "copy or download the whole folder again")]
        return Weights(f"{len(found)} {_format(folder / found[0])} files", [folder / name for name in found], findings)
    if len(found) > 1:
        said = f"there are several files with weights, {_some(found)}, and no library looks for any of these names"
        return Weights("several weight files", [], [Finding("several", ERROR, said, "name the file, not the folder")])
    said = f"the weights are called {shown(found[0])}, and libraries look for {WEIGHTS[0][0]}"
    findings = [Finding("name", WARNING, said, "--mend writes them under that name", is_mended=True)]
    return Weights(f"one {_format(folder / found[0])} file", [folder / found[0]], findings)


def _extras(folder: Path, found: Weights) -> list[Finding]:
    """What lies next to the weights and changes what a library reads."""
    names = sorted(path.name for path in folder.iterdir())
    findings = []
    if found.kind != ADAPTER and found.files and {*ADAPTER_FILES} & {*names}:
        findings += _adapter_finding(folder, "adapter-and-weights")
    kinds = [pair for pair in WEIGHTS if {*pair} & {*names}]
    if len(kinds) > 1:
        said = "the weights are there twice, as safetensors and pickled; libraries read the safetensors"
        findings.append(Finding("formats", NOTE, said, "remove the pickled ones if they are older"))
    for single, index in WEIGHTS:
        if {single, index} <= {*names}:
            said = f"{single} and {index} are both there, and {single} is read"
            findings.append(Finding("index", WARNING, said, "remove the one that is older"))
    inner = folders_with_weights(folder)
    if inner:
        where = f"the subfolder{'s' * (len(inner) > 1)} {_some(inner)}"
        if found.files:
            said = f"{where} hold{'s' * (len(inner) == 1)} a model too; libraries read the one at the top"
            findings.append(Finding("subfolder", NOTE, said, f"for that one, subfolder={inner[0]!r}"))
        else:
            said = f"the model lies in {where}"
            findings.append(Finding("subfolder", ERROR, said, f"name {folder / inner[-1]}"))
    elif not found.files and not found.findings:
        what = without_model(folder, names) or (f"there are no weights among {len(names)} files", "name their folder")
        findings.append(Finding("no-weights", ERROR, *what))
    return findings


def _distributed(folder: Path) -> Path | None:
    """The folder of a distributed checkpoint: this one, or the only one in it that is not the optimizer's."""
    inner = [
        path.parent for path in sorted(folder.glob(f"*/{METADATA}")) if not NOT_WEIGHTS.fullmatch(path.parent.name)
    ]
    places = [each for each in [folder, *inner] if (each / METADATA).is_file()]
    return places[0] if places and (places[0] == folder or len(places) == 1) else None


def _joined_note(kind: str) -> Finding:
    return Finding(
        "sharded",
        WARNING,
        f"the weights are {kind}, which only the training framework reads: no from_pretrained does",
        "--mend joins the parts into safetensors",
        is_mended=True,
    )


def _adapter_finding(folder: Path, kind: str = "adapter") -> list[Finding]:
    said = adapter_said(folder)
    return [] if said is None else [Finding(kind, ERROR, *said)]


def _format(path: Path) -> str:
    return "safetensors" if path.name.startswith("model.safe") or path.suffix == ".safetensors" else "pickled"


def _some(names: Iterable[str], limit: int = 4) -> str:
    known = list(names)
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return ", ".join(map(shown, known[:limit])) + more
