"""Which files of a folder hold its weights, and what kind of folder that makes it, by their names only."""

import os
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from blockformer.files.container_kinds import MEGATRON
from blockformer.files.containers import (
    ADAPTER_WEIGHTS,
    ADAPTERS,
    NOT_WEIGHTS,
    NUMBERED,
    UNFINISHED,
    adapter_said,
    container_of,
    folders_with_weights,
    misnamed,
    not_finished,
    numbered_files,
    of_another_index,
    ranks_of,
    shard_said,
    some,
    without_model,
)
from blockformer.files.errors import CheckpointError, ConversionError
from blockformer.files.names import PICKLED_SUFFIXES, VOCABULARIES, WEIGHT_FILES, WEIGHT_NAMES, WEIGHTS, weight_map

from .distributed import METADATA
from .finding import ERROR, NOTE, WARNING, Finding
from .rank_files import rank_files
from .zero import zero_files, zero_folder

ADAPTER = "a LoRA adapter"
DISTRIBUTED = "a distributed checkpoint (DCP)"
RANKS = "FSDP shards"
ZERO = "the parts of DeepSpeed ZeRO"


@dataclass
class Weights:
    """The weights of a folder.

    Attributes:
        kind: how they are stored, in words.
        files: which are read, in order.
        findings: what is unusual about the files.
        places: of an index, tensor -> file.
    """

    kind: str = "no weights"
    files: list[Path] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    places: dict[str, str] | None = None


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
    if ranks := ranks_of([source.name]):
        return Weights(RANKS, [], [Finding("fsdp-shard", ERROR, *shard_said(ranks, source.parent))])
    kind = ADAPTER if source.name in ADAPTER_WEIGHTS else f"one {_format(source)} file"
    return Weights(kind, [source], _adapter_finding(source.parent) if kind == ADAPTER else [])


def _in_folder(folder: Path) -> Weights:
    names = sorted(path.name for path in folder.iterdir())
    for single, index in WEIGHTS:
        if single in names:
            return Weights(f"one {_format(folder / single)} file", [folder / single])
        if index in names:
            return _of_index(folder, index)
    for name in ADAPTER_WEIGHTS:
        if name in names:
            return Weights(ADAPTER, [folder / name], _adapter_finding(folder))
    if "adapter_config.json" in names and not any(name.endswith(WEIGHT_FILES) for name in names):
        return Weights("no weights", [], _adapter_finding(folder))
    place = _distributed(folder)
    if place and not (place / MEGATRON).exists():
        return Weights(DISTRIBUTED, [place / METADATA], [_joined_note(DISTRIBUTED)])
    try:
        if ranks := rank_files(folder):
            return Weights(RANKS, ranks, [_joined_note(RANKS)])
    except CheckpointError as error:
        return Weights(RANKS, [], [Finding("file", ERROR, str(error))])
    try:
        if parts := zero_folder(folder):
            return Weights(ZERO, [*chain(*zero_files(parts))], [_joined_note(ZERO)])
    except CheckpointError as error:
        return Weights(ZERO, [], [Finding("zero", ERROR, str(error))])
    other = container_of([*names, MEGATRON] if place else names, folder)
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
    others = numbered_files(folder)
    if missing == files and others:
        said, fix = of_another_index(files, others)
        found = _of_numbered(folder, others)
        found.findings = [Finding("index", ERROR, said, fix, True), *(f for f in found.findings if f.severity == ERROR)]
        return found
    kind = f"{len(files)} {_format(folder / files[0])} files"
    findings = []
    if missing:
        lost = sum(file in missing for file in places.values())
        said = f"{len(missing)} of {len(files)} weight files are missing, with {lost} of {len(places)} tensors"
        findings = [Finding("shards", ERROR, said, f"copy or download {some(missing)}", names=tuple(missing))]
    return Weights(kind, [folder / name for name in files if name not in missing], findings, places)


def _of_numbered(folder: Path, names: list[str]) -> Weights:
    """Numbered files without an index."""
    match = NUMBERED.fullmatch(names[0])
    count = int(match[2]) if match else 0
    said = "the index of the weight files is missing, and libraries find them only by it"
    findings = [Finding("index", WARNING, said, "--mend writes one", is_mended=True)]
    if count != len(names):
        said = f"{count - len(names)} of {count} weight files are missing"
        findings = [Finding("shards", ERROR, said, "copy or download the whole folder again")]
    return Weights(f"{len(names)} {_format(folder / names[0])} files", [folder / name for name in names], findings)


def _unusual(folder: Path, names: list[str]) -> Weights:
    """Weights under names that no library looks for."""
    safe = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(PICKLED_SUFFIXES) and not NOT_WEIGHTS.fullmatch(name)]
    found = safe or [name for name in pickles if not (folder / name).is_dir()]
    if not found:
        return Weights()
    saves = {match.groups() for name in found if (match := NUMBERED.fullmatch(name))}
    if len(saves) == 1 and all(map(NUMBERED.fullmatch, found)):
        return _of_numbered(folder, found)
    if len(saves) > 1:
        said = f"there are files of several saves, {some(found)}, and no index says which belong together"
        return Weights(
            "several weight files", [], [Finding("several", ERROR, said, "move the files of the others away")]
        )
    if len(found) > 1:
        said = f"there are several files with weights, {some(found)}, and no library looks for any of these names"
        return Weights("several weight files", [], [Finding("several", ERROR, said, "name the file, not the folder")])
    findings = [Finding("name", WARNING, misnamed(found[0]), "--mend writes them under that name", is_mended=True)]
    return Weights(f"one {_format(folder / found[0])} file", [folder / found[0]], findings)


def _extras(folder: Path, found: Weights) -> list[Finding]:
    """What lies next to the weights and changes what a library reads."""
    names = sorted(path.name for path in folder.iterdir())
    findings = []
    if found.kind != ADAPTER and found.files and {*ADAPTERS} & {*names}:
        findings += _adapter_finding(folder, "adapter-and-weights")
    kinds = [pair for pair in WEIGHTS if {*pair} & {*names}]
    if len(kinds) > 1:
        said = "the weights are there twice, as safetensors and pickled; libraries read the safetensors"
        findings.append(Finding("formats", NOTE, said, "remove the pickled ones if they are older"))
    for single, index in WEIGHTS:
        if {single, index} <= {*names}:
            said = f"{single} and {index} are both there, and {single} is read"
            findings.append(Finding("index", WARNING, said, "remove the one that is older"))
    if found.files:
        findings += _beside(folder, names, found)
    elif not found.findings or folders_with_weights(folder):
        said, fix = without_model(folder, names) or _nothing(names)
        kind = "subfolder" if "subfolder" in said else "no-weights"
        findings.append(Finding(kind, ERROR, said, fix))
    return findings


def _beside(folder: Path, names: list[str], found: Weights) -> list[Finding]:
    """Other weights next to the ones that are read."""
    findings = []
    if inner := folders_with_weights(folder):
        where = f"the subfolder{'s' * (len(inner) > 1)} {some(inner)}"
        said = f"{where} hold{'s' * (len(inner) == 1)} a model too; libraries read the one at the top"
        findings.append(Finding("subfolder", NOTE, said, f"for that one, subfolder={inner[0]!r}"))
    read = {path.name for path in found.files}
    unfinished = [name for name in names if UNFINISHED.fullmatch(name)]
    if cut := [name for name in unfinished if name.rpartition(".")[0] in read]:
        findings.append(Finding("download", ERROR, not_finished(cut[0]), "download it again", names=tuple(cut)))
    known = {*WEIGHT_NAMES}
    others = [name for name in names if name.endswith(".safetensors") and name not in read | known | {*ADAPTER_WEIGHTS}]
    if (others and found.places is not None) or (read & known and others):
        said = f"{some(others)} hold{'s' * (len(others) == 1)} weights too, and transformers does not read them"
        fix = "a server that reads every file of a folder takes them for a part of the model: move them away"
        findings.append(Finding("other-weights", NOTE, said, fix, names=tuple(others)))
    return findings


def _nothing(names: list[str]) -> tuple[str, str]:
    """What is in a folder without weights, and the remedy."""
    here = next((name for name in ("config.json", *VOCABULARIES) if name in names), None)
    if here is None:
        return f"there are no weights among {len(names)} files", "name their folder"
    return f"there is {here}, and there are no weights", "they were not saved, copied or downloaded: name their folder"


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
