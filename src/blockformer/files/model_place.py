"""Where the model of a repo of `sentence-transformers` lies: next to `modules.json`, or in its own folder.

Older releases wrote `0_Transformer/` next to `1_Pooling/`. Our repos always have the model next to `modules.json`,
where Auto classes look. So the files of such a source are read as if they lay there (`laid_flat`), and the way back
puts the model into its folder again (`put_into_its_folder`).
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import CheckpointError, shown
from .json_files import json_text, read_json_value
from .names import MODULES, ROUTER, SETTINGS, has_weights, is_inner, module_folders, module_paths

IN_ITS_PLACE = ("BoW", "CLIPModel", "SparseStaticEmbedding", "StaticEmbedding", "WordEmbeddings")
"""Modules of sentence-transformers that read an input themselves, without a language model of transformers."""
AROUND = "around/"
"""The beginning of the name of a file next to `modules.json` whose own name is that of one of the model's files too."""


def folder_of_model(folder: Path) -> str:
    """The folder that holds the model, if `modules.json` names one and no model lies next to it; else ""."""
    places = _places(folder)
    return places[0] if len(places) == 1 and not _is_linked(folder, places[0]) else ""


def model_elsewhere(folder: Path) -> str:
    """Why a folder with `modules.json` cannot be read as one model, and what to do; "" for every other folder."""
    if not os.path.lexists(folder / MODULES):
        return ""
    if (first := _first_module(_read(folder / MODULES))) in IN_ITS_PLACE:
        what = f"{MODULES}: the first module is a {first}, and only models of transformers that read text are converted"
        return f"{what}; open the folder with sentence-transformers"
    if _has_model(folder):
        return ""
    places = _places(folder)
    if not places:
        fix = "only models of transformers are converted, and there is none among these modules"
        return "" if os.path.lexists(folder / "config.json") else f"{MODULES}, and no config.json: {fix}"
    if _is_linked(folder, places[0]):
        return f"the model is in {shown(places[0])}, which is a link: put the folder itself there"
    there = f"no model next to {MODULES}, but {len(places)} in {', '.join(map(shown, places))}"
    return f"{there}: a repo holds one; convert {folder / places[0]} for that model only"


def laid_flat(names: Iterable[str], inner: str) -> tuple[str, ...]:
    """The names of a source's files as if the model's lay next to `modules.json`.

    Args:
        names: of all files.
        inner: the folder of the model.
    """
    start = f"{inner}/"
    names = [*names]
    model = {name.removeprefix(start) for name in names if name.startswith(start)}
    rest = (name for name in names if not name.startswith(start))
    return tuple(sorted({*model, *(AROUND + name if name in model else name for name in rest)}))


def modules_of(read: Callable[[str], Any], inner: str) -> tuple[Any, Any]:
    """The content of `modules.json` and of `router_config.json`, with the model next to them.

    Args:
        read: gives the content of a file by its name, None if there is none.
        inner: the folder of the model; "" if it lies there.
    """
    modules, router = read(MODULES), read(ROUTER)
    return (_renamed(modules, inner, ""), _renamed(router, inner, "")) if inner else (modules, router)


def put_into_its_folder(target: Path, inner: str, around: Iterable[str]) -> None:
    """Move the files of the model in an official folder into its own folder.

    Args:
        target: the folder, as if the model lay next to `modules.json`.
        inner: the folder that the model had.
        around: names (of `laid_flat`) of the files that lay around it.
    """
    names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    stay = {*around, MODULES, ROUTER, SETTINGS}
    folders = {name.partition("/")[0] for name in stay if "/" in name}
    folders |= {*module_folders(names, *(_read(target / name) for name in (MODULES, ROUTER)))} - {inner}
    starts = tuple(f"{folder}/" for folder in folders)
    moves = {name: f"{inner}/{name}" for name in names if name not in stay and not name.startswith(starts)}
    moves |= {name: name.removeprefix(AROUND) for name in names if name in stay and name.startswith(AROUND)}
    for name, place in moves.items():  # the model's files move first: others may have their names
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        (target / name).rename(target / place)
    for path in sorted((each for each in target.rglob("*") if each.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    for path in (target / MODULES, target / ROUTER):
        content = _read(path)
        if content != (renamed := _renamed(content, "", inner)):  # it was changed in the repo
            path.write_text(json_text(renamed), encoding="utf-8")


def _places(folder: Path) -> list[str]:
    """The folders of models that `modules.json`, or the settings of a Router next to it, name."""
    if not os.path.lexists(folder / MODULES) or _has_model(folder):
        return []
    paths = dict.fromkeys(module_paths(*(_read(folder / name) for name in (MODULES, ROUTER))))
    inner = (PurePosixPath(path).as_posix() for path in paths if is_inner(path) and path)
    return [path for path in inner if is_of_model(folder / path / "config.json")]


def _first_module(modules: Any) -> str:
    """The name of the class of the first module, without its library."""
    first = modules[0] if isinstance(modules, list) and modules else None
    return str(first.get("type")).rpartition(".")[2] if isinstance(first, dict) else ""


def _is_linked(folder: Path, inner: str) -> bool:
    return (folder / inner).resolve() != folder.resolve() / inner


def _renamed(content: Any, old: str, new: str) -> Any:
    """The content of `modules.json` or `router_config.json` with another folder of the model."""

    def named(path: Any) -> Any:
        return new if isinstance(path, str) and PurePosixPath(path) == PurePosixPath(old) else path

    if isinstance(content, list):
        is_router = any(isinstance(each, dict) and str(each.get("type")).endswith(".Router") for each in content)
        if is_router and not old:  # whose own files lie next to `modules.json`
            return content
        return [{**each, "path": named(each.get("path"))} if isinstance(each, dict) else each for each in content]
    if not isinstance(content, Mapping) or not isinstance(content.get("types"), dict):
        return content
    routes = content.get("structure")
    if isinstance(routes, dict):
        routes = {key: [*map(named, each)] if isinstance(each, list) else each for key, each in routes.items()}
    return {**content, "types": {named(key): kind for key, kind in content["types"].items()}, "structure": routes}


def _has_model(folder: Path) -> bool:
    path = folder / "config.json"
    return is_of_model(path) or (os.path.lexists(path) and has_weights(folder))


def is_of_model(path: Path) -> bool:
    """Whether a file has the settings of a model, and not of a module such as a projection."""
    config = _read(path)
    return isinstance(config, dict) and not {"model_type", "architectures", "vocab_size"}.isdisjoint(config)


def _read(path: Path) -> Any:
    if not os.path.lexists(path):
        return None
    try:
        return read_json_value(path)
    except CheckpointError:
        return None
