"""The way back of a repo for search: the decoder that it was made of, every weight and file as it was."""

import os
from pathlib import Path

from blockformer.files.errors import ConversionError
from blockformer.files.json_files import read_json
from blockformer.files.new_repo import RepoOptions
from blockformer.files.side_file_kinds import digest, is_plain
from blockformer.files.sources import Source
from blockformer.model_classes import MODELS
from blockformer.publishing.repo_code import release_code
from blockformer.publishing.write_repo import write_repo

from .exporting import record_of
from .model_tensors import expected_tensors, identity_rules, with_sources
from .origin import BEFORE
from .plan import architecture_of, our_config
from .uses import HEAD, SCORE
from .writing import AroundWeights, CheckpointWeights

RECORD = "record.json"
"""The file in `BEFORE` that names the files which were written, with their SHA-256; and says if a head was stored."""
ROOT = "model."


def can_be_undone(place: Source) -> bool:
    """Whether a repo was made of a decoder for search."""
    return f"{BEFORE}/config.json" in place.names


def undo(around: AroundWeights, options: RepoOptions) -> None:
    """Write the decoder that a repo for search was made of, with the weights that the repo has today.

    Raises:
        ConversionError: its head is gone, or the record is damaged.
    """
    checkpoint, place = around.checkpoint, around.place
    if not all(os.path.isfile(checkpoint.folder / BEFORE / name) for name in ("config.json", RECORD)):
        fix = "download the whole repo first: hf download ID --local-dir FOLDER"
        raise ConversionError(f"{place.path / BEFORE}: a file that the way back needs is not here; {fix}")
    text = checkpoint.member(f"{BEFORE}/config.json").read_text(encoding="utf-8")
    config = our_config(read_json(checkpoint.member(f"{BEFORE}/config.json")))
    record = read_json(checkpoint.member(f"{BEFORE}/{RECORD}"))
    written = record.get("written")
    if not isinstance(written, dict) or not all(map(is_plain, written)) or config.model_type != "blockformer_decoder":
        raise ConversionError(f"{place.path / BEFORE / RECORD}: damaged; convert the first source again")
    shapes, tied, parameters = expected_tensors(MODELS[architecture_of(config)], config)
    if HEAD in shapes and HEAD not in tied:
        what = f"{place.path}: the language model's head is not here, and the embeddings are not tied to it"
        raise ConversionError(f"{what}; convert the first source again")
    owned = (name for name in checkpoint.tensors if name != SCORE)
    names = {name if name in shapes else f"{ROOT}{name}": name for name in owned}
    headers = {name: checkpoint.tensors[own] for name, own in names.items()}
    groups = with_sources(identity_rules(shapes).plan(headers, shapes, optional=[*tied]), names)
    if record.get("has_head") is True and HEAD in tied:  # it was stored twice
        first = next(group for group in groups if group.targets[0].name == tied[HEAD])
        groups.append(first.renamed(lambda _: HEAD))

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text(text, encoding="utf-8")
        copies = [name for name in record_of(checkpoint, place) if not name.startswith(f"{BEFORE}/")]
        around.fill(folder, config, release_code(place.path, config), copies)
        for name, sha in written.items():
            path = folder / name
            if not path.is_file() or digest(path) != sha:
                continue  # its owner changed or removed it
            path.unlink()
            if os.path.lexists(checkpoint.folder / BEFORE / name):
                path.write_bytes(checkpoint.member(f"{BEFORE}/{name}").read_bytes())
            elif path.parent != folder:
                path.parent.rmdir()
        around.write_card(folder, config, parameters, origin=f"Made from `{place.name}` by Blockformer.")

    write_repo(CheckpointWeights(checkpoint, groups, [], place.files), options, fill, around.report)
