"""What a converted repo records of the official checkpoint that it came from, so that the way back is exact."""

import os
from dataclasses import dataclass, field
from typing import Any

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import CheckpointError, ConversionError, shown
from blockformer.files.json_files import json_text, read_json
from blockformer.files.names import is_inner

from .families.registry import FAMILIES, Family
from .storage.variant import CheckpointVariant

ORIGIN = "conversion.json"
"""The file of the record. A repo without it is converted back by its settings only."""
BEFORE = "conversion/before"
"""Where a repo for search keeps the parts of the decoder that it replaced: config, sentence-transformers' settings."""
RECORD = 1
"""The version of the record. One without a version is from before there was one."""
FORMER_TRAITS = {"4 bits", "mxfp4", "fp8"}
"""Traits in records without a version: formats of low-bit weights, which the config tells."""
FORM = {"head", "traits", "sizes"}
"""What the record says of a checkpoint's variant."""


@dataclass(frozen=True)
class Origin:
    """The record.

    Attributes:
        family: the official family.
        config: the official `config.json`.
        variant: how the official checkpoint was written; None in repos of early versions.
        unused: names of tensors that no model uses; they are stored next to the weights.
        files: what became of the files next to the weights (`SideFiles.record`); empty in repos of early versions.
        composite: which composite checkpoint the text was taken from (`TextCheckpoint.fingerprint`); empty for none.
    """

    family: Family
    config: dict[str, Any]
    variant: CheckpointVariant | None
    unused: list[str]
    files: dict[str, Any] = field(default_factory=dict)
    composite: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The file's text."""
        assert self.variant is not None
        assert self.variant.traits <= self.family.names.words, f"{self.family.name} does not list {self.variant.traits}"
        variant = {"head": self.variant.head, "traits": sorted(self.variant.traits), "sizes": self.variant.sizes}
        entries = {
            "version": RECORD,
            "family": self.family.name,
            "form": variant,
            "unused": self.unused,
            "files": self.files,
        }
        entries |= {"composite": self.composite} if self.composite else {}
        return json_text({**entries, "config": self.config})


def read_origin(checkpoint: Checkpoint) -> Origin | None:
    """The record of a repo, or None if it has none.

    Raises:
        ConversionError: it is damaged, or a link that leaves the folder.
    """
    path = checkpoint.folder / ORIGIN
    if not os.path.lexists(path):
        return None
    try:
        entries = read_json(checkpoint.member(ORIGIN))
    except CheckpointError as error:
        raise ConversionError(
            f"{error}; download the file again, or delete it to convert by config.json only"
        ) from error
    name, official, variant, unused = (entries.get(key) for key in ("family", "config", "form", "unused"))
    unused = entries.get("kept") if unused is None else unused  # as repos of early versions have it
    damaged = ConversionError(f"{path}: damaged; delete it, it is not needed")
    if not isinstance(name, str) or name not in FAMILIES or not isinstance(official, dict):
        raise damaged
    version = entries.get("version", 0)
    if type(version) is not int:
        raise damaged
    if version > RECORD:
        raise ConversionError(
            f"{path}: version is {version}, and this release reads {RECORD} at most: pip install --upgrade "
            "blockformer, or delete the file to convert by config.json only"
        )
    if variant is None:
        return Origin(FAMILIES[name], official, None, [])
    if not isinstance(variant, dict) or not all(map(_is_names, ([variant.get("head")], variant.get("traits"), unused))):
        raise damaged
    traits = frozenset(variant["traits"]) - (frozenset() if version else FORMER_TRAITS)
    unknown = sorted(traits - FAMILIES[name].names.words | {*variant} - FORM)
    if unknown:
        raise ConversionError(
            f"{path}: form: {shown(unknown[0])} means nothing to this release for a checkpoint of {name}, so its "
            "names cannot be restored; undo the change to this file, or install a later blockformer if a later "
            "release wrote it, or delete the file to convert by config.json only"
        )
    sizes = variant.get("sizes", {})
    if not isinstance(sizes, dict) or not all(isinstance(size, list) for size in sizes.values()):
        raise damaged
    earlier = CheckpointVariant(variant["head"], traits, {name: tuple(size) for name, size in sizes.items()})
    try:
        FAMILIES[name].names.head(earlier)
    except StopIteration:
        raise damaged from None
    files, composite = entries.get("files", {}), entries.get("composite", {})
    if not _are_files(files) or not isinstance(composite, dict):
        raise damaged
    return Origin(FAMILIES[name], official, earlier, list(unused or []), files, composite)


def _are_files(value: Any) -> bool:
    """Whether a record lists these files next to the weights."""
    if not isinstance(value, dict):
        return False
    if not all(isinstance(value.get(each, {}), dict) for each in ("written", "left_out")):
        return False
    lists = [*(value.get(each, []) for each in ("stored", "pickled", "around")), *value.get("left_out", {}).values()]
    return all(map(_is_names, lists)) and is_inner(value.get("inner", ""))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
