"""Find a checkpoint: a folder, a repo on the Hugging Face Hub (fetched into the Hub's cache), or one file."""

import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from .container_kinds import GGUF_REMEDY
from .errors import ConversionError, shown
from .json_files import read_json_value
from .model_place import folder_of_model, laid_flat
from .names import (
    CODE_FILES,
    MODULES,
    ROUTER,
    WEIGHT_FILES,
    is_side_file,
    module_folders,
    weight_map,
    weights_of,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
PAGE = re.compile(
    r"(https?://(www\.)?(huggingface\.co|hf\.co)/|hf://)?(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)"
    r"(/?|(@|/(tree|blob|resolve)/)(?P<revision>[\w.-]+)(/.*)?)"
)
"""The address of a repo on the Hub, as a browser or another tool shows it."""
FILE_URL = "file://"
LISTED = 10_000
"""Names of a source that are looked at; no model has so many files."""
GGUF = ".gguf"


class Reading(TypedDict, total=False):
    """Which files of a source are read, and from where; as `from_pretrained` takes them.

    Attributes:
        revision: of a Hub id, a branch, tag or commit.
        token: for a Hub id; None takes the one of `hf auth login`.
        cache_dir: where a Hub id is downloaded to, if not to the Hub's own cache.
        subfolder: the folder inside the source that holds the model.
        variant: of the weight files: "fp16" reads `model.fp16.safetensors`.
        use_safetensors: True reads only safetensors, False only pickles; None reads what there is, safetensors first.
        local_files_only: do not ask the Hub, and read what its cache has.
        force_download: download a Hub id again, whatever the cache has.
    """

    revision: str | None
    token: str | bool | None
    cache_dir: "str | PathLike[str] | None"
    subfolder: str | None
    variant: str | None
    use_safetensors: bool | None
    local_files_only: bool
    force_download: bool


READING = tuple(Reading.__annotations__)
WEIGHT_CHOICES = ("variant", "use_safetensors")


def for_the_hub(reading: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `huggingface_hub` takes."""
    return {name: reading[name] for name in READING if name in reading and name not in ("subfolder", *WEIGHT_CHOICES)}


@dataclass(frozen=True)
class Source:
    """What a conversion reads.

    Attributes:
        path: a folder, or one weight file.
        hub_id: its Hub id, if it was fetched.
        config: the JSON file with the settings of a weight file.
        listing: names of all files of a fetched repo, fetched or not; None where it could not be fetched.
        subfolder: where the model lies in it; `path` is that folder, and names are those in it.
        variant, use_safetensors: which of its weights are read; see `weights_of`.
        around: the folder with `modules.json`, where the model lies in its own folder; see `laid_flat`.
    """

    path: Path
    hub_id: str | None = None
    config: Path | None = None
    listing: tuple[str, ...] | None = None
    subfolder: str = ""
    variant: str | None = None
    use_safetensors: bool | None = None
    around: Path | None = None

    @property
    def weights(self) -> tuple[tuple[str, str], ...]:
        """The names of the weights that are looked for."""
        return weights_of(self.variant, self.use_safetensors)

    @property
    def loading(self) -> dict[str, Any]:
        """The options by which `from_pretrained` reads the same weights of `path`."""
        chosen = {"variant": self.variant or None, "use_safetensors": self.use_safetensors}
        return {name: value for name, value in chosen.items() if value is not None}

    def title(self, src: str | PathLike[str]) -> str:
        """What a report calls it: its Hub id, or the user's name for it."""
        return "/".join(filter(None, (self.hub_id or os.fspath(src), self.subfolder)))

    @property
    def name(self) -> str:
        """Its Hub id, or the name of its folder."""
        return self.hub_id or (self.around or self.path).name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its files, with "/" between folders; see `laid_flat`."""
        names = files_in(self.around or self.path) if self.listing is None else self.listing
        return names if self.around is None else laid_flat(names, self.path.relative_to(self.around).as_posix())

    @property
    def files(self) -> list[Path]:
        """The paths that must not change."""
        return [self.around or self.path] if self.config is None else [self.path, self.config]


def weight_file(source: str | PathLike[str], config: str | PathLike[str]) -> Source:
    """A checkpoint that is a single file, with its settings in another one.

    Raises:
        ConversionError: the file does not exist, or holds no weights.
    """
    path = Path(source)
    if path.is_dir():
        raise ConversionError(f"{path}: a folder; for this family name the weight file itself")
    if not os.path.lexists(path):
        raise ConversionError(f"{path}: no such file")
    if path.suffix not in WEIGHT_FILES:
        raise ConversionError(f"{path}: not a weight file; its name must end in {', '.join(WEIGHT_FILES)}")
    return Source(path, config=Path(config))


def folder_of(source: str | PathLike[str], revision: str | None = None) -> Path | None:
    """The folder a source names, or None if it can only be a Hub id.

    Raises:
        ConversionError: it is neither, or a folder, with a revision.
    """
    text = os.fspath(source)
    if not text:
        raise ConversionError("the name of the source is empty; name a folder or a Hub id")
    folder = Path(text)
    if folder.is_dir():
        if revision is not None:
            raise ConversionError(f"{text}: a folder, which has no revision {shown(revision)}; leave it out")
        return folder
    if os.path.lexists(folder):
        if text.endswith(GGUF):
            raise ConversionError(f"{text}: a GGUF file; {_plain_from(os.fspath(folder.parent), folder.name)}")
        raise ConversionError(f"{text}: not a folder; name the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(text) or ".." in text:
        raise ConversionError(f"{text}: no such folder{_meant(text)}")
    return None


def _meant(text: str) -> str:
    """What a source that is neither a folder nor a Hub id was meant to be, if it shows; else ""."""
    if (home := os.path.expanduser(text)) != text and os.path.isdir(home):
        return f"; write {home}, since ~ is not followed"
    if text.startswith(FILE_URL) and os.path.isdir(inner := text.removeprefix(FILE_URL)):
        return f"; write {inner}"
    page = PAGE.fullmatch(text)
    if page is None or not (text.startswith(("http", "hf:")) or page["revision"]):
        return ""
    revision = (
        f", with revision {shown(page['revision'])} (--revision)" if page["revision"] not in (None, "main") else ""
    )
    return f"; the repo on the Hub is {shown(page['id'])}{revision}"


def locate(
    source: str | PathLike[str], config: str | PathLike[str] | None = None, *, weights: bool = True, **reading: Any
) -> Source:
    """The folder of a checkpoint, and its Hub id if it was one. An existing folder takes precedence.

    Args:
        source: a folder or a Hub id such as "Qwen/Qwen3-0.6B"; or a weight file, with `config`.
        config: the JSON file with the settings of a weight file.
        weights: also fetch the weights.
        reading: see `Reading`.

    Raises:
        ConversionError: the folder or repo does not exist, or cannot be fetched.
    """
    if config is not None:
        return weight_file(source, config)
    folder = folder_of(source, reading.get("revision"))
    chosen = {name: reading.get(name) for name in ("variant", "use_safetensors")}
    place = Source(Path(), subfolder=inner_name(reading.get("subfolder")), **chosen)
    if folder is None:
        found = _fetch(os.fspath(source), weights, place, for_the_hub(reading))
    else:
        found = replace(place, path=inside(folder, place.subfolder))
    if inner := folder_of_model(found.path):
        found = replace(found, path=found.path / inner, around=found.path)
    _check_format(os.fspath(source), [name for name in found.names if "/" not in name], weights, found.weights)
    return found


def _check_format(source: str, names: Iterable[str], weights: bool, wanted: Iterable[tuple[str, str]]) -> None:
    """Refuse a source whose weights are only there as GGUF, with what makes plain ones of them."""
    known = {*names}
    gguf = sorted(name for name in known if name.endswith(GGUF))
    is_readable = not weights or any(name in known for pair in wanted for name in pair)
    if gguf and not ("config.json" in known and is_readable):
        raise ConversionError(f"{source}: has its weights only as GGUF; {_plain_from(source, gguf[0])}")


def _plain_from(folder: str, file: str) -> str:
    return f"{GGUF_REMEDY.format(folder=folder, name=file)}; then convert NEW"


def inner_name(subfolder: str | PathLike[str] | None) -> str:
    """A subfolder with "/" between folders; "" for none."""
    name = PurePosixPath(os.fspath(subfolder or "").replace("\\", "/")).as_posix()
    return "" if name == "." else name


def inside(folder: Path, subfolder: str) -> Path:
    """A folder's subfolder.

    Raises:
        ConversionError: there is none.
    """
    if subfolder and not (folder / subfolder).is_dir():
        there = sorted(path.parent.name for path in folder.glob("*/config.json"))
        raise ConversionError(f"{folder}: has no subfolder {shown(subfolder)}{_instead(there)}")
    return folder / subfolder


def _instead(names: list[str]) -> str:
    return f"; there are {', '.join(map(shown, names[:20]))}" if names else "; none of its folders has a config.json"


def files_in(folder: Path) -> tuple[str, ...]:
    """The names of all files in a folder, with "/" between folders; a linked folder is one name, and so is `.git`."""
    names = []
    for root, folders, files in os.walk(folder):
        inner = Path(root).relative_to(folder)
        whole = {name for name in folders if name in (".git", ".cache") or os.path.islink(os.path.join(root, name))}
        names += [(inner / name).as_posix() for name in sorted(files)]
        names += [f"{(inner / name).as_posix()}/" for name in sorted(whole)]
        folders[:] = sorted({*folders} - whole)
        if len(names) > LISTED:
            break
    return tuple(names[:LISTED])


def _fetch(hub_id: str, weights: bool, place: Source, hub: Mapping[str, Any]) -> Source:
    """Download a repo's files that a conversion reads; anything else, code included, is not fetched.

    Only weights that are read are fetched: one file, or the files that the index names. `place` says which they are,
    and in which subfolder.
    """
    from huggingface_hub import snapshot_download

    start = f"{place.subfolder}/" if place.subfolder else ""
    try:
        commit, files = _files_on_the_hub(hub_id, hub)
        if commit is None:  # what the cache has
            folder = Path(snapshot_download(hub_id, **{**hub, "local_files_only": True}))
            return replace(place, path=inside(folder, place.subfolder), hub_id=hub_id)
        sizes = {name.removeprefix(start): size for name, size in files.items() if name.startswith(start)}
        listing = tuple(sorted(sizes)[:LISTED])
        wanted = {**hub, "revision": commit}  # all files of one commit, whatever is pushed meanwhile

        def fetch(names: Iterable[str]) -> Path:
            patterns = [glob.escape(start + name) for name in names]
            return Path(snapshot_download(hub_id, allow_patterns=patterns, **wanted), place.subfolder)

        if start and not listing:
            there = sorted(name.partition("/")[0] for name in files if re.fullmatch(r"[^/]+/config\.json", name))
            raise ConversionError(f"{shown(hub_id)}: has no subfolder {shown(place.subfolder)}{_instead(there)}")
        folder = fetch(name for name in listing if is_side_file(name, sizes[name]))
        if MODULES in listing:
            settings = (read_json_value(folder / name) if name in listing else None for name in (MODULES, ROUTER))
            inner = tuple(f"{each}/" for each in module_folders(listing, *settings))
            fetch([MODULES, *(name for name in listing if name.startswith(inner) and not name.endswith(CODE_FILES))])
        single, index = next((pair for pair in place.weights if {*pair} & {*listing}), place.weights[0])
        if weights and single in listing:
            fetch([single])
        elif weights and index in listing:
            fetch([index])
            fetch(weight_map(folder / index).values())
        return replace(place, path=folder, hub_id=hub_id, listing=listing)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"{shown(hub_id)}: no folder of that name, and it could not be fetched from the Hugging Face Hub: "
            f"{why_not_fetched(error, hub)}"
        ) from error


def _files_on_the_hub(hub_id: str, hub: Mapping[str, Any]) -> tuple[str | None, dict[str, int]]:
    """A repo's commit and name -> size of its files; None as the commit if the Hub may not or cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if hub.get("local_files_only"):
        return None, {}
    try:
        api = HfApi(token=hub.get("token"))
        info = api.model_info(hub_id, revision=hub.get("revision"), files_metadata=True)
    except HfHubHTTPError:
        raise
    except Exception:  # offline
        return None, {}
    return info.sha, {file.rfilename: getattr(file, "size", None) or 0 for file in info.siblings or ()}


def why_not_fetched(error: Exception, hub: Mapping[str, Any]) -> str:
    """Why a download failed, and what helps."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "its owner must grant you access first; ask for it on the repo's page, then log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {shown(hub.get('revision'))}; name a branch, a tag or a commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no repo has that name; check it or, if it is private, your access to it (`hf auth login`)"
    if hub.get("local_files_only"):
        return "local_files_only is set, and the cache does not have it; leave that out, or name a folder"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache does not have it; unset it, or name a folder"
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError):
        return f"{constants.ENDPOINT} cannot be reached, and the cache does not have it; are you offline?"
    return f"{type(error).__name__}; check the name, the connection, and your access to it"
