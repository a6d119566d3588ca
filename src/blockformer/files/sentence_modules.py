"""What `sentence-transformers` reads in addition to a model: its settings, and the folders of the modules after it.

`modules.json` names the class and the folder of each module. A folder is carried whole, whatever its name and its
class, except for code. Its files have the same place in both layouts.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .checkpoint import Checkpoint
from .errors import shown
from .json_files import read_json_value
from .model_place import modules_of
from .named_code import LARGE_JSON, OTHER_REPO, foreign_modules, names_code, other_repo
from .names import MODULES, ROUTER, SENTENCE_FILES, is_inner, module_folders, module_paths
from .regular import open_regular
from .safetensors_io import read_header

ENCODER_ONLY = ("t5", "mt5", "umt5", "t5gemma")
"""Types of encoder-decoders of which sentence-transformers loads the encoder, whatever else the file has."""


@dataclass(frozen=True)
class SentenceFiles:
    """The files of `sentence-transformers` in a source.

    Attributes:
        names: what it reads next to the model, and everything in the folders of its modules.
        problem: why a Blockformer repo must not have them; "" where it may.
        places: name -> new content of files that name the model's place, if the model moves next to them.
    """

    names: frozenset[str]
    problem: str = ""
    places: Mapping[str, Any] = field(default_factory=dict)


def sentence_files(checkpoint: Checkpoint, names: Iterable[str]) -> SentenceFiles:
    """Find the files of `sentence-transformers`.

    `modules.json` and the settings of a module can name any class to load, so only classes of the library itself and of
    PyLate are accepted, and activations of PyTorch and transformers.

    Args:
        checkpoint: the source.
        names: its files.

    Raises:
        CheckpointError: one of them is damaged, or a link that leaves the folder.
    """
    names = sorted(names)

    def read(name: str) -> Any:
        return read_json_value(checkpoint.member(name)) if os.path.lexists(checkpoint.path(name)) else None

    modules, router = modules_of(read, checkpoint.inner)
    folders = () if modules is None else tuple(f"{each}/" for each in module_folders(names, modules, router))
    found = [name for name in names if name in SENTENCE_FILES or name.startswith(folders)]
    problem = "" if modules is None else _problem(names, modules, router) or _decoder_in(checkpoint)
    for name in found:
        if not os.path.isfile(checkpoint.path(name)):
            continue
        if name.endswith(".json") and PurePosixPath(name).name not in LARGE_JSON:
            problem = problem or _code_in(name, read_json_value(checkpoint.member(name)))
        elif name.endswith(".safetensors"):
            with open_regular(checkpoint.member(name)) as file:
                read_header(file, checkpoint.path(name))
    places = {MODULES: modules, ROUTER: router} if checkpoint.inner else {}
    places = {name: content for name, content in places.items() if content is not None}
    return SentenceFiles(frozenset(found), problem and f"{problem}; sentence-transformers' files are left out", places)


def missing_code(folder: Path) -> list[str]:
    """A note on modules of an official folder whose code its source had and it has not; or no note."""
    if not os.path.isfile(folder / MODULES):
        return []
    foreign = foreign_modules(MODULES, read_json_value(folder / MODULES))
    what = "is code of the first source, which is never carried: copy it from there before you open the folder with"
    return [f"{MODULES}: {shown(foreign[0])} {what} sentence-transformers"] if foreign else []


def _problem(names: Iterable[str], modules: Any, router: Any) -> str:
    """Why the content of `modules.json` and `router_config.json` is not one to follow."""
    if foreign := foreign_modules(MODULES, modules):
        return f"{MODULES}: {shown(foreign[0])} is not a module of sentence-transformers, and other code is never run"
    if stray := [path for path in module_paths(modules, router) if not is_inner(path)]:
        return f"{MODULES}: a module's path is {shown(stray[0])}, which is not a folder of the source's own"
    for kind, path in ((module["type"], module["path"]) for module in modules):
        start = f"{PurePosixPath(path).as_posix()}/"
        is_empty = start != "./" and not any(name.startswith(start) for name in names)
        if is_empty and not kind.endswith(".Normalize"):  # which may have no settings
            return f"{MODULES}: {shown(kind)} in {shown(path)}, where there are no files"
    return ""


def _decoder_in(checkpoint: Checkpoint) -> str:
    """Why the modules are not of the model that the weights are: it has a decoder, which only ours would run."""
    kind = checkpoint.config.get("model_type")
    if kind not in ENCODER_ONLY or not any(".decoder." in f".{name}" for name in checkpoint.tensors):
        return ""
    return (
        f"{MODULES}: sentence-transformers loads only the encoder of a {kind}, and these weights have a decoder, too; "
        "to convert an embedder, convert the folder that SentenceTransformer(FOLDER).save_pretrained(NEW) writes"
    )


def _code_in(name: str, content: Any) -> str:
    """Which code a file of settings names that is not of these libraries; "" where it names none."""
    place = PurePosixPath(name).parent.as_posix() if "/" in name else name
    if (code := names_code(content)) is not None:
        return f"{MODULES}: {code[0]} {shown(code[1])} in {place}"
    if repo := other_repo(PurePosixPath(name).name, content):
        return f"{MODULES}: {OTHER_REPO} {shown(repo)} in {name} is another repo, whose code would be run"
    foreign = [] if name == MODULES else foreign_modules(name, content)
    return f"{MODULES}: {shown(foreign[0])} in {place} is not a module of sentence-transformers" if foreign else ""
