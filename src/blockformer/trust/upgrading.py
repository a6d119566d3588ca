"""Brings an older repo to the installed release: its code, its config and its card; `blockformer upgrade`."""

import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..declared_fields import of_the_package
from ..files.atomic import MARK, states_of
from ..files.config_file import read_config
from ..files.containers import without_config
from ..files.earlier_names import are_earlier, present_name
from ..files.errors import ConversionError, shown
from ..files.json_files import json_text, read_json
from ..files.new_repo import RepoOptions
from ..files.writer import Planned
from ..model.axes import blocks_of
from ..model.blocks import ENTRY
from ..model.configuration_blockformer import BlockformerConfig
from ..model.release import FORMAT, STAMP, VERSION
from ..model_classes import CONFIGS
from ..publishing.model_card import with_code_of
from ..publishing.repo_code import EXTRA_CODE, IMPORT, code_files, copy_code
from ..publishing.signing import SIGNATURE
from ..publishing.write_repo import RepoReport, write_repo
from .manifest import is_later
from .result import Verification
from .verification import verify


def upgrade(repo: str | PathLike[str]) -> Verification:
    """Rewrite a repo's code, config and card as the installed release writes them. The folder changes at once or not.

    The weights stay the files that they are; only those with names from before 0.1.0 are written under today's names,
    every tensor as it was. A signature is removed, since it would not hold. Everything else stays, permissions too.

    Args:
        repo: a folder, such as a copy of a Hub repo (`hf download ID --local-dir FOLDER`).

    Returns:
        What `verify` says of the new repo; a note names files that were removed.

    Raises:
        ConversionError: a later release wrote the repo, it cannot be read, its weights would not fit, or its
            owner's code would be overwritten. The folder is as it was.
    """
    folder = Path(repo)
    if not folder.is_dir():
        raise ConversionError(f"{repo}: no such folder; download a Hub repo first: hf download ID --local-dir FOLDER")
    if not os.path.lexists(folder / "config.json"):
        raise ConversionError(f"{repo}: {without_config(folder)}")
    entries = read_config(folder / "config.json")
    config = _config(repo, entries)
    before = states_of(folder)
    kept, folders = _content(folder)
    kept -= {MARK, SIGNATURE, "config.json", *_own_code(folder, entries.get("auto_map")), *_block_files(folder, config)}
    if others := sorted(kept & code_files(config).keys()):
        what = f"{', '.join(others)}: code that auto_map does not lead to, under names of this release's files"
        raise ConversionError(f"{repo}: {what}; move it away first")
    found = Verification(os.fspath(repo))

    def fill(temporary: Path) -> None:
        nonlocal found
        _write(temporary / "config.json", config.to_json_string())
        copy_code(temporary, config)
        for name in EXTRA_CODE.keys() & kept:
            if _first_line(temporary / name) == _first_line(EXTRA_CODE[name]):  # else it is the owner's
                _write(temporary / name, EXTRA_CODE[name].read_text(encoding="utf-8"))
        if "README.md" in kept:
            card = (temporary / "README.md").read_text(encoding="utf-8", errors="surrogateescape")
            _write(temporary / "README.md", with_code_of(card, config))
        found = verify(temporary)
        if wrong := found.problems.get("weights"):
            raise ConversionError(f"{repo}: not upgraded, its weights are not the config's: {'; '.join(wrong[:5])}")
        gone = sorted(name for name in before if not (temporary / name).exists())
        if gone:
            what = "removed, since today's code does not use it and a signature would not hold"
            found.notes.append(f"{what}: {', '.join(map(shown, gone))}")

    weights = KeptFiles(folder, config, kept, folders)
    write_repo(weights, RepoOptions(), fill, RepoReport(os.fspath(repo), folder), renewed=before)
    found.repo = os.fspath(repo)
    return found


class KeptFiles:
    """The weights of a repo that is renewed, and all other files that stay: second names of the old ones.

    Args:
        folder: the repo.
        config: its config, as this release writes it.
        kept: the names of the files.
        folders: the names of all folders.
    """

    def __init__(self, folder: Path, config: BlockformerConfig, kept: Collection[str], folders: Iterable[str]):
        self.name, self.files = os.fspath(folder), list[Path]()  # the target is the source, and checked as such
        self.folder, self.config, self.kept, self.folders = folder, config, kept, folders

    def planned(self) -> list[Planned]:
        """Nothing: no tensor changes."""
        return []

    def check_unchanged(self) -> None:
        """Nothing: `atomic_folder` compares all files of the target with what they were."""

    def write(self, temporary: Path, options: RepoOptions) -> dict[str, int]:
        """Give the files their second names; weights with names from before 0.1.0 are written under today's."""
        for name in ("", *self.folders):
            (temporary / name).mkdir(parents=True, exist_ok=True)
            (temporary / name).chmod(stat.S_IMODE((self.folder / name).stat().st_mode) | stat.S_IRWXU)
        for name in self.kept:
            _link(self.folder / name, temporary / name)
        _rename_weights(temporary, self.config, self.name)
        return {}


def _config(repo: str | PathLike[str], entries: Mapping[str, Any]) -> BlockformerConfig:
    """The config of a repo that this release may rewrite."""
    kind = CONFIGS.get(str(entries.get("model_type")))
    if kind is None:
        raise ConversionError(f"{repo}: model_type {shown(entries.get('model_type'))} is not one of Blockformer's")
    version, number = (entries.get(name) for name in STAMP)
    if is_later(str(version)) or (isinstance(number, int) and number > FORMAT):
        what = f"{repo}: Blockformer {version} wrote it, which is later than {VERSION}, and nothing is downgraded"
        raise ConversionError(f"{what}: install blockformer {version} or later")
    try:
        return kind.from_dict({name: value for name, value in entries.items() if name != "auto_map"})
    except (ValueError, TypeError) as error:
        raise ConversionError(f"{repo}: config.json: {error}") from error


def _content(folder: Path) -> tuple[set[str], list[str]]:
    """The names of all files and folders in a folder; refuses links, as the Hub's cache has them."""
    files, folders = set(), []
    for root, below, names in os.walk(folder):
        for name in (*below, *names):
            path = Path(root, name)
            kind = path.lstat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                fix = "upgrade a copy: hf download ID --local-dir FOLDER"
                raise ConversionError(f"{path}: a link, or no regular file, as in the Hub's cache; {fix}")
        inner = Path(root).relative_to(folder)
        files |= {(inner / name).as_posix() for name in names}
        folders += [(inner / name).as_posix() for name in below]
    return files, folders


def _own_code(folder: Path, auto_map: Any) -> set[str]:
    """The modules that a repo's `auto_map` loads, and what they import, found without running them."""
    codes = auto_map.values() if isinstance(auto_map, Mapping) else ()
    waiting = [code.rpartition("--")[2].partition(".")[0] for code in codes if isinstance(code, str)]
    found: set[str] = set()
    while waiting:
        name = f"{waiting.pop()}.py"
        if name not in found and re.fullmatch(r"\w+\.py", name) and (folder / name).is_file():
            found.add(name)
            waiting += IMPORT.findall((folder / name).read_text(encoding="utf-8", errors="replace"))
    return found


def _block_files(folder: Path, config: BlockformerConfig) -> set[str]:
    """The files that are written anew for a config's blocks from outside; refuses one that its owner has edited."""
    blocks = blocks_of(config)
    for block in blocks:
        path = folder / block.file
        if block not in of_the_package() and path.is_file() and path.read_bytes() != block.source:
            what = f"{path} is not as it is registered, or as config.json names it, and would be replaced"
            raise ConversionError(f"{what}; move it away first, or save the model again with the edited block")
    return {*(name for block in blocks for name in block.digests), ENTRY, "blocks.py"} if blocks else set()


def _first_line(path: Path) -> str:
    """That of a docstring, by which code of ours is known whatever its release."""
    return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]


def _link(source: Path, target: Path) -> None:
    """A second name of a file, or a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write(path: Path, text: str) -> None:
    """Write a file that may be a second name of another; one that is replaced keeps its permissions."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    if mode is not None:
        path.chmod(mode)


def _rename_weights(folder: Path, config: BlockformerConfig, repo: str | PathLike[str]) -> None:
    """Write weights that have names of before 0.1.0 under today's; `repo` is the folder that an error names."""
    placement = config.norm_placement
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                names, metadata = list(file.keys()), file.metadata()
        except SafetensorError as error:
            raise ConversionError(f"{Path(repo) / path.name}: damaged, download it again: {error}") from error
        if are_earlier(names):
            if any(folder.glob("optimizer*")):
                what = "a Trainer checkpoint of before 0.1, whose optimizer numbers the weights in another order"
                raise ConversionError(f"{repo}: {what}: `blockformer export` makes a repo of its weights")
            tensors = {present_name(name, placement): tensor for name, tensor in load_file(path).items()}
            mode = stat.S_IMODE(path.stat().st_mode)
            path.unlink()
            save_file(tensors, path, metadata)
            path.chmod(mode)
    for path in folder.glob("*.safetensors.index.json"):
        index = read_json(path)
        places = index.get("weight_map", {})
        if are_earlier(places):
            index["weight_map"] = {present_name(name, placement): file for name, file in places.items()}
            _write(path, json_text(index))
