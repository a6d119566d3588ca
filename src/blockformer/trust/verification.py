"""Checks a published repo without running anything of it: `blockformer verify`."""

import hashlib
import json
import os
import re
import stat
import unicodedata
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from blockformer.conversion.model_tensors import unread_pooler
from blockformer.conversion.options import check_reading
from blockformer.conversion.origin import ORIGIN, read_origin
from blockformer.conversion.plan import architecture_of, our_config

from ..declared_fields import of_the_package
from ..files.checkpoint import Checkpoint
from ..files.containers import what_it_is
from ..files.errors import CheckpointError, ConversionError, shown
from ..files.generation_settings import check_settings
from ..files.json_files import read_json_value
from ..files.named_code import (
    LARGE_JSON,
    entries_in,
    foreign_modules,
    imports_other,
    loads_code,
    other_repo,
)
from ..files.names import MODULES, ROUTER, is_inner, module_paths, roots_of
from ..files.quantized import check_plain, quantized_entries
from ..files.side_file_kinds import STORE, digest, is_plain
from ..files.sources import LISTED, WEIGHT_CHOICES, files_in, folder_of, for_the_hub, why_not_fetched
from ..model.axes import BLOCKS
from ..model.blocks import ENTRY, entry
from ..model.release import STAMP, VERSION
from ..model_classes import CONFIGS, MODELS
from ..publishing.repo_code import MODEL
from ..publishing.signing import check_signature
from .manifest import Manifest, is_later, manifest_of
from .result import Verification

PUBLIC = frozenset([*MODELS, *(each.__name__ for each in CONFIGS.values())])
"""The names that an `auto_map` may have."""
CODE = frozenset(
    ".py .pyc .pyd .pyw .pyi .so .dll .dylib .exe .sh .bash .bat .cmd .ps1 .js .mjs .ipynb .jar .whl .egg .pl .rb .lua "
    ".php .cu .cpp .c .h .ptx .cubin .pt2 .onnx_data .wasm".split()
)
"""Endings of files that are run, or that something may take for a program."""
PICKLES = frozenset(".bin .pt .pth .ckpt .pkl .pickle .dill .joblib .npy .npz .h5 .hdf5 .keras".split())
PICKLE = re.compile(rb"\x80[\x02-\x05]")
ESCAPES = re.compile(r"__|\battr\b|{%[-+]?\s*(import|include|extends|from)\b|\|\s*attr\s*\(")
"""What no chat template needs: ways out of the sandbox that templates run in, and other files."""
FORBIDDEN = re.compile(r'[<>:"|?*]|[. ]$')
"""What no name has on Windows, which leaves out dots and spaces at the end, and reads a stream after a colon."""
LONGEST_TEMPLATE = 1 << 20
BLOCK = re.compile(r"[A-Za-z]\w*\.py", re.ASCII)
"""The name of a block's file."""
RECORD = ("conversion.json", "conversion/")
"""Beginnings of the names of files that a repo keeps from its source, and that only the way back reads."""
WITH_BLOCKS = "blocks.py"
"""The file of a release that its repos have only with blocks."""


def verify(
    repo: str | PathLike[str],
    revision: str | None = None,
    key: str | PathLike[str] | None = None,
    **reading: Any,
) -> Verification:
    """Check a repo of Blockformer: its code, its other files, its weights' names and shapes. Nothing of it is run.

    A block from outside, a file of the repo's author's that the config names, is reported as a file to read, unless it
    is registered in this process.

    Args:
        repo: a folder, which is read offline, or a Hub id, of which everything is downloaded.
        revision: of a Hub id: a branch, tag or commit.
        key: a public key (PEM) that the repo must be signed with; see `sign`.
        reading: for a Hub id: `token`, `cache_dir`, `local_files_only` and `force_download`, as `from_pretrained` takes
            them. A whole repo is checked, so you cannot choose files.

    Returns:
        What is wrong, by kind of check: `problems` is empty if nothing is.

    Raises:
        ConversionError: the repo does not exist, or its `config.json` is not Blockformer's.
    """
    check_reading("verify", reading, not_read=("subfolder", *WEIGHT_CHOICES))
    folder = folder_of(repo, revision) or _download(os.fspath(repo), {"revision": revision, **reading})
    found = Verification(os.fspath(repo))
    names = _check_files(folder, found)
    config, problem = _config(folder, names)
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(config, dict) or str(model_type) not in CONFIGS:
        what = "no config.json" if config is None else f"model_type {shown(model_type)}"
        what += f" ({problem})" if problem else ""
        raise ConversionError(f"{repo}: {what}, so this is not a repo of Blockformer; verify checks no others")
    kind = CONFIGS[str(model_type)]
    _check_code(folder, names, config, kind, found)
    registered = {(each.file, each.digest) for values in BLOCKS.values() for each in values.values()}
    found.to_read = [name for name, digest in found.blocks.items() if (name, digest) not in registered]
    _check_settings(folder, names, kind, found)
    _check_weights(folder, config, found)
    if key is not None:
        for problem in check_signature(folder, key):
            found.add("signature", problem)
    return found


def _download(hub_id: str, reading: Mapping[str, Any]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, **for_the_hub(reading)))
    except Exception as error:  # of the network and of the Hub, dozens of classes
        raise ConversionError(
            f"{hub_id}: no folder of that name, and it could not be fetched from the Hugging Face Hub: "
            f"{why_not_fetched(error, reading)}"
        ) from error


def _check_files(folder: Path, found: Verification) -> set[str]:
    """Hash every file. A link to elsewhere, or anything but a regular file, is a problem and not read."""
    roots = roots_of(folder)
    names = files_in(folder)
    if len(names) >= LISTED:
        found.add("files", f"more than {LISTED:,} files, of which the others are not looked at")
    for name in names:
        path = folder / name
        if name.endswith("/"):
            if path.is_symlink():
                found.add("files", f"{shown(name)} is a linked folder")
            else:
                found.notes.append(f"{name} is not looked at")
            continue
        try:
            real = path.resolve(strict=True)
            if not any(real.is_relative_to(root) for root in roots):
                found.add("files", f"{shown(name)} is a link that leaves the folder")
            elif not stat.S_ISREG(real.stat().st_mode):
                found.add("files", f"{shown(name)} is not a regular file")
            else:
                found.files[name] = digest(real)
                _check_kind(real, name, found)
        except (OSError, RuntimeError, CheckpointError) as error:
            found.add("files", f"{shown(name)} cannot be read: {error}")
    _check_names(names, found)
    return set(found.files)


def _check_names(names: Collection[str], found: Verification) -> None:
    """No two names mean the same file on another system, which could then load one that was not checked."""
    seen: dict[str, str] = {}
    for name in names:
        parts = name.removesuffix("/").split("/")
        is_kept = name.startswith(f"{STORE}/")  # as the source has it, and loaded by nothing
        if not is_kept and (not is_plain(name) or any(FORBIDDEN.search(part) for part in parts)):
            found.add("files", f"{shown(name)}: a name that not every system can have")
        other = seen.setdefault(unicodedata.normalize("NFKC", name).casefold(), name)
        if other != name:
            found.add("files", f"{shown(other)} and {shown(name)} are one file on some systems")


def _check_kind(path: Path, name: str, found: Verification) -> None:
    """Pickles, by name or content. A safetensors file begins with a number, which may look like the start of one."""
    ending = PurePosixPath(name).suffix.lower()
    with open(path, "rb") as file:
        start = file.read(2048)
    is_archive = start.startswith(b"PK\x03\x04") and b".pkl" in start
    if ending in PICKLES or (ending != ".safetensors" and (PICKLE.match(start) or is_archive)):
        found.add("files", f"{shown(name)} is a pickle, or may be one: loading it can run code")


def _check_code(folder: Path, names: set[str], config: dict[str, Any], kind: type, found: Verification) -> None:
    version, number = (config.get(name) for name in STAMP)
    manifest = manifest_of(version) if isinstance(version, str) else None
    code = sorted(name for name in names if PurePosixPath(name).suffix.lower() in CODE)
    if manifest is None:
        if version is None:
            fix = "`blockformer upgrade` writes its code anew"
            problem = f"config.json names no release: the repo is from before 0.1.0, or was edited; {fix}"
        else:
            fix = f": install blockformer {version} or later and verify again" if is_later(str(version)) else ""
            problem = f"release {shown(version)} is not known to Blockformer {VERSION}{fix}"
        found.add("code", problem)
        if code:
            found.add("code", f"nothing vouches for {', '.join(map(shown, code))}: read them, or do not load the repo")
        return
    found.release, found.format = manifest.release, manifest.format
    if number != manifest.format:
        found.add("code", f"config.json says format {shown(number)}, release {version} writes {manifest.format}")
    wanted = list(manifest.topologies[kind.model_type])  # type: ignore[attr-defined]
    blocks = config.get("blocks") or {}
    parts = manifest.files.keys() & blocks if isinstance(blocks, dict) else set()  # of the release, for some configs
    wanted += [WITH_BLOCKS, *sorted(parts)] if blocks else []
    for name in wanted:
        if name not in names:
            found.add("code", f"{name} is missing")
    own = _check_blocks(folder, names, blocks, parts, kind, found)
    for name in code:
        if name in own:
            continue
        if name not in wanted and not ("/" in name and name in manifest.files):
            found.add("code", f"{shown(name)} is not code of Blockformer: read it, or do not load the repo")
        elif found.files[name] not in (manifest.files[name], manifest.stand_ins.get(name)):
            found.add("code", f"{name} differs from release {version}{_place(folder, name, manifest)}")


def _check_blocks(
    folder: Path, names: set[str], blocks: Any, parts: set[str], kind: Any, found: Verification
) -> set[str]:
    """The code of a repo with blocks that is not the release's: those from outside, and what imports all of them.

    `parts` are the blocks that are files of the release.
    """
    if not blocks:
        return set()
    others = blocks.keys() - parts if isinstance(blocks, dict) else set()
    are_parts = parts <= {name for block in of_the_package() for name in block.digests}
    if not (isinstance(blocks, dict) and all(map(BLOCK.fullmatch, blocks)) and are_parts):
        found.add("code", f"config.json: blocks must name files of its author's, not {shown(json.dumps(blocks))}")
        return set()
    for name, wanted in ((each, blocks[each]) for each in sorted(others)):
        if name not in names:
            found.add("code", f"{name} is missing")
            continue
        found.blocks[name] = found.files[name]
        if found.files[name] != wanted:
            found.add("code", f"{name} is not the block that config.json was written with, by its SHA-256")
    first = f"{kind.auto_classes['AutoConfig'].partition('.')[0]}.py"
    source = (folder / first).read_text(encoding="utf-8", errors="replace") if first in names else ""
    imports = entry(sorted(blocks), kind.auto_classes, source).encode()
    if ENTRY not in names:
        found.add("code", f"{ENTRY} is missing")
    elif found.files[ENTRY] != hashlib.sha256(imports).hexdigest():
        found.add("code", f"{ENTRY} is not as Blockformer writes it, which imports the blocks and the model only")
    return {ENTRY, *others}


def _place(folder: Path, name: str, manifest: Manifest) -> str:
    """Where a file differs from that of the installed release, if that is the one."""
    if manifest.release != VERSION or not (MODEL / name).exists():
        return ""
    wanted, present = ((place / name).read_bytes() for place in (MODEL, folder))
    if present.replace(b"\r\n", b"\n") == wanted:
        return ": its lines end as on Windows; clone again with git config core.autocrlf false"
    ours, theirs = wanted.splitlines(), present.splitlines()
    pairs = enumerate(zip(ours, theirs, strict=False), 1)
    line = next((number for number, (one, other) in pairs if one != other), min(len(ours), len(theirs)) + 1)
    return f", from line {line} on"


def _check_settings(folder: Path, names: set[str], kind: type, found: Verification) -> None:
    """Nothing in a JSON file names code, and no template leaves its sandbox."""
    for name in sorted(names):
        ending = PurePosixPath(name).suffix.lower()
        if ending == ".jinja":
            _check_template(name, (folder / name).read_text(encoding="utf-8", errors="replace"), found)
        if ending != ".json" or PurePosixPath(name).name in LARGE_JSON or name.startswith(f"{STORE}/"):
            continue  # from `STORE` nothing is loaded, and what it has of a source may be damaged
        try:
            content = read_json_value(folder / name)
        except CheckpointError as error:
            found.add("settings", str(error))
            continue
        if name.startswith(RECORD):
            continue
        for key, value in entries_in(content):
            if name == "config.json" and key == "auto_map" and value is content.get("auto_map"):
                unknown = names if found.release is None else set()
                if (stray := _stray(value, kind, bool(content.get("blocks")), unknown)) is not None:
                    found.add("settings", f"config.json: auto_map names {stray}, which is not this repo's code")
            elif loads_code(key, value):
                found.add("settings", f"{name}: {key} names code to load: {shown(json.dumps(value))}")
            elif imports_other(key, value):
                what = "which is not a class of PyTorch, transformers or sentence-transformers"
                found.add("settings", f"{name}: {key} names {shown(value)}, {what}")
            elif key in ("chat_template", "template"):
                texts = value.values() if isinstance(value, dict) else [value]
                for text in (each for each in texts if isinstance(each, str)):
                    _check_template(name, text, found)
        if repo := other_repo(PurePosixPath(name).name, content):
            found.add("settings", f"{name}: the tokenizer is taken from another repo, {shown(repo)}, with its code")
        for module in foreign_modules(name, content):
            found.add("settings", f"{name}: {shown(module)} is not a module of sentence-transformers")
        paths = module_paths(content) if name == MODULES else module_paths(None, content) if name == ROUTER else []
        for path in (path for path in paths if not is_inner(path)):
            found.add("settings", f"{name}: a module's path is {shown(path)}, which is not a separate folder")
        if name.endswith("adapter_config.json"):
            found.notes.append(f"{name}: the model that the adapter is for is another repo, which is not looked at")


def _stray(auto_map: Any, kind: type, has_blocks: bool, unknown: Collection[str]) -> str | None:
    """What an `auto_map` names besides the topology's own classes; with blocks from outside by way of `ENTRY`.

    `unknown` has the files of a repo of an unknown release, whose modules had other names; the code's check names them.
    """
    if not isinstance(auto_map, dict):
        return shown(auto_map)
    own = set(kind.auto_classes.values())  # type: ignore[attr-defined]
    modules = {ENTRY.removesuffix(".py")} if has_blocks else {code.partition(".")[0] for code in own}
    modules |= {name.removesuffix(".py") for name in unknown if name.endswith(".py")}
    for code in auto_map.values():
        module, _, name = str(code).partition(".")
        if not (isinstance(code, str) and module in modules and name in PUBLIC):
            return shown(code)
    return None


def _check_template(name: str, text: str, found: Verification) -> None:
    if len(text) > LONGEST_TEMPLATE:
        found.add("settings", f"{name}: a chat template of {len(text):,} characters")
    elif escape := ESCAPES.search(text):
        found.add("settings", f"{name}: the chat template has {shown(escape[0])}, which no template needs")


def _check_weights(folder: Path, config: dict[str, Any], found: Verification) -> None:
    """Names and shapes of the weights match the class that the config names."""
    if found.to_read:
        found.weights_compared = False
        found.notes.append("names and shapes of weights are not compared: blocks that are not registered have some")
        return
    try:
        settings = our_config(config)  # without the entries that name code: a model would load a kernel of the Hub
        name = architecture_of(settings)
        cls: Any = MODELS[name]
        with Checkpoint(folder) as checkpoint:
            tensors = dict(checkpoint.tensors)
            _check_record(checkpoint, found)
            if cls.can_generate():
                _check_generation(checkpoint, found)
        check_plain(config, tensors)
        if quantized_entries(config):
            found.weights_compared = False
            found.notes.append("weights quantized by another library: names and shapes are not compared")
            return
        with torch.device("meta"):
            model = cls(settings)
            pooler = {key: torch.empty(shape) for key, shape in unread_pooler(cls, model.config).items()}
    except (ConversionError, ValueError, TypeError) as error:
        found.add("weights", str(error))
        return
    expected = model.state_dict(keep_vars=True)
    groups: dict[int, list[str]] = {}
    for key, tensor in expected.items():
        groups.setdefault(id(tensor), []).append(key)  # tied weights are one tensor, stored once
    for keys in groups.values():
        if not any(key in tensors for key in keys):
            found.add("weights", f"{keys[0]} is missing")
    expected = {**expected, **pooler}  # which only `AutoModel` reads
    if earlier := [info.name for key, info in tensors.items() if info.name != key]:
        fix = "`blockformer upgrade` writes today's into safetensors files; for pickles, use `blockformer export`"
        found.add("weights", f"{shown(earlier[0])} is one of {len(earlier)} names of before 0.1, for which {fix}")
    for key, info in sorted(tensors.items()):
        if key not in expected:
            found.add("unused", f"{shown(key)} is not a weight of {name}")
            continue
        wanted = expected[key]
        if tuple(info.shape) != tuple(wanted.shape):
            found.add("weights", f"{key} is {list(info.shape)}, the config says {list(wanted.shape)}")
        elif info.dtype.is_floating_point != wanted.dtype.is_floating_point:
            found.add("weights", f"{key} is {info.dtype}, where the model has {wanted.dtype}")


def _check_generation(checkpoint: Checkpoint, found: Verification) -> None:
    """The settings of generation are such that the model loads."""
    try:
        check_settings(checkpoint.folder)
    except CheckpointError:  # no JSON, which is said already
        return
    except ConversionError as error:
        found.add("settings", str(error))


def _check_record(checkpoint: Checkpoint, found: Verification) -> None:
    """The record of an official checkpoint, if there is one, is as the way back needs it."""
    try:
        read_origin(checkpoint)
    except ConversionError as error:
        if not any(ORIGIN in problem for problem in found.problems.get("settings", ())):  # not JSON: said already
            found.add("settings", str(error))


def _config(folder: Path, names: Collection[str]) -> tuple[Any, str | None]:
    """The content of `config.json`; or None, and what the folder or the file is instead."""
    if "config.json" not in names:
        return None, what_it_is(folder)
    try:
        return read_json_value(folder / "config.json"), None
    except CheckpointError as error:
        return None, str(error)
