"""The way back for the files next to the weights: what came with the source, or what has replaced it since."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .atomic import MARK
from .checkpoint import Checkpoint
from .errors import ConversionError
from .json_files import json_text
from .module_pickles import as_pickle, is_of_module, safe_name
from .names import MODULE_PICKLE, SENTENCE_FILES
from .sentence_modules import missing_code, sentence_files
from .side_file_kinds import (
    MADE_BY_US,
    STORE,
    TOKENIZER_CONFIG,
    copy_file,
    digest,
    is_note,
    is_plain,
    is_regular,
    stays,
)
from .side_files import SideFiles, check_generation, name_the_rest, write_tokenizer_config
from .tokenizers import check_readable, load


def return_side_files(
    checkpoint: Checkpoint,
    names: Iterable[str],
    target: Path,
    record: Mapping[str, Any],
    unmissed: Iterable[str] = (),
) -> SideFiles:
    """Write the files next to the weights of our repo into an official folder: what came, or what replaced it.

    Args:
        checkpoint: the repo.
        names: its files.
        target: an existing folder.
        record: `SideFiles.record` of the conversion that made the repo; empty for a model that was trained here.
        unmissed: names of further files that only our layout has, and that nobody will miss.

    Raises:
        ConversionError: a file is damaged, missing, or a link that leaves the folder.
    """
    result = SideFiles(checkpoint, target)
    check_generation(checkpoint)
    names = set(names)
    stored = [name for name in record.get("stored", ()) if isinstance(name, str) and is_plain(name)]
    written: Mapping[str, Any] = record.get("written", {})
    of_sentences = sentence_files(checkpoint, names)
    result.notes += [of_sentences.problem] if of_sentences.problem else []
    own = {name for name in written if name in names and digest(checkpoint.member(name)) == written[name]}
    done = {"config.json", TOKENIZER_CONFIG, MARK, *own}
    for name in sorted(name for name in names - done if not name.startswith(MADE_BY_US)):
        path, problem = checkpoint.path(name), of_sentences.problem
        is_read = name in of_sentences.names and is_of_module(name) and not problem
        is_text = is_note(name, path) and not (problem and name in (*of_sentences.names, *SENTENCE_FILES))
        if not (stays(name) or is_read or is_text) or not is_regular(path):
            continue
        if PurePosixPath(name).name == MODULE_PICKLE:
            result.carry_pickle(name)
        elif name in of_sentences.places and not problem:
            result.write(name, json_text(of_sentences.places[name]))
        else:
            result.carry(name)
    check_readable(checkpoint.folder)
    result.tokenizer = load(checkpoint.folder)
    if TOKENIZER_CONFIG in names - own:
        write_tokenizer_config(result)
    for name in stored:
        if not os.path.lexists(target / name):  # else it was changed in the repo, and has been copied from there
            _return_stored(checkpoint, name, names, target)
            done |= {f"{STORE}/{name}", f"{STORE}/{name}.safetensors"}
    for name in record.get("pickled", ()):
        if not os.path.lexists(target / name) and (weights := safe_name(name)) in names:
            as_pickle(checkpoint.member(weights), target / name)
    check_readable(target)
    result.notes += missing_code(target)
    name_the_rest(result, sorted(names), {*done, *unmissed})
    if left := record.get("left_out"):
        count = sum(len(each) for each in left.values())
        result.notes.append(f"not carried from the first source: {count} file{'s' * (count > 1)} (see conversion.json)")
    return result


def _return_stored(checkpoint: Checkpoint, name: str, names: set[str], target: Path) -> None:
    """Write a file that the repo keeps of its source to the place where it was."""
    if f"{STORE}/{name}.safetensors" in names:
        as_pickle(checkpoint.member(f"{STORE}/{name}.safetensors"), target / name)
    elif f"{STORE}/{name}" in names:
        copy_file(checkpoint, f"{STORE}/{name}", target / name)
    else:
        raise ConversionError(
            f"{checkpoint.folder / STORE / name}: missing, and the official checkpoint had it; download the whole "
            "repo again, or delete conversion.json for a checkpoint without it"
        )
