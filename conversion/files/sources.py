"""Find a checkpoint: a folder, a repo on the Hugging Face Hub (fetched into the Hub's cache), or one file."""

import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import ConversionError, shown
from .names import WEIGHT_FILES, WEIGHTS, is_side_file, weight_map

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
LISTED = 10_000
"""Names of a source that are looked at; no model has so many files."""
GGUF = ".gguf"


@dataclass(frozen=True)
class Source:
    """What a conversion reads.

    Attributes:
        path: a folder, or one weight file.
        hub_id: its Hub id, if it was fetched.
        config: the JSON file with the settings of a weight file.
        listing: names of all files of a fetched repo, fetched or not; None where it could not be fetched.
    """

    path: Path
    hub_id: str | None = None
    config: Path | None = None
    listing: tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its files, with "/" between folders."""
        return files_in(self.path) if self.listing is None else self.listing

    @property
    def files(self) -> list[Path]:
        """The paths that must not change."""
        return [self.path] if self.config is None else [self.path, self.config]


def weight_file(source: str | PathLike[str], config: str | PathLike[str]) -> Source:
    """A checkpoint that is a single file, with its settings in another one.

    Raises:
        ConversionError: there is no such file, or it is not a weight file.
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
        raise ConversionError(f"{text}: no such folder")
    return None


def locate(source: str | PathLike[str], weights: bool = True, **hub: Any) -> Source:
    """The folder of a checkpoint, and its Hub id if it was one. An existing folder takes precedence.

    Args:
        source: a folder or a Hub id such as "Qwen/Qwen3-0.6B".
        weights: also fetch the weights.
        hub: for a Hub id: `revision`, `token` and `cache_dir`, as `huggingface_hub.snapshot_download` takes them.

    Raises:
        ConversionError: there is no such folder or repo, or it cannot be fetched.
    """
    folder = folder_of(source, hub.get("revision"))
    found = Source(folder) if folder is not None else _fetch(os.fspath(source), weights, hub)
    _check_format(os.fspath(source), [name for name in found.names if "/" not in name], weights)
    return found


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that are read, or an index of them."""
    return any(os.path.lexists(folder / name) for pair in WEIGHTS for name in pair)


def _check_format(source: str, names: Iterable[str], weights: bool) -> None:
    """Refuse a source whose weights are only there as GGUF, with what makes plain ones of them."""
    known = {*names}
    gguf = sorted(name for name in known if name.endswith(GGUF))
    is_readable = not weights or any(name in known for pair in WEIGHTS for name in pair)
    if gguf and not ("config.json" in known and is_readable):
        raise ConversionError(f"{source}: has its weights only as GGUF; {_plain_from(source, gguf[0])}")


def _plain_from(folder: str, file: str) -> str:
    return (
        "conversion reads safetensors and PyTorch files. transformers makes plain weights of it, with the package gguf "
        f"installed: model = AutoModelForCausalLM.from_pretrained({shown(folder)}, gguf_file={shown(file)}), "
        "model.hf_quantizer = None, del model.config.quantization_config, model.save_pretrained(NEW); the tokenizer "
        "likewise with AutoTokenizer; then convert NEW"
    )


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


def _fetch(hub_id: str, weights: bool, hub: Mapping[str, Any]) -> Source:
    """Download a repo's files that a conversion reads; anything else, code included, is not fetched.

    Of the weights only those are fetched that are read: one file, or those that the index names.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted = dict(hub)
    listing: tuple[str, ...] | None
    try:
        try:
            api = HfApi(token=hub.get("token"))
            info = api.model_info(hub_id, revision=hub.get("revision"), files_metadata=True)
            sizes = {file.rfilename: getattr(file, "size", None) or 0 for file in info.siblings or ()}
            listing = tuple(sorted(sizes)[:LISTED])
            wanted["revision"] = info.sha  # all files of one commit, whatever is pushed meanwhile
        except HfHubHTTPError:
            raise
        except Exception:
            listing = None  # offline: what the cache has
        if listing is None:
            folder = Path(snapshot_download(hub_id, **{**hub, "local_files_only": True}))
            return Source(folder, hub_id)

        def fetch(names: Iterable[str]) -> Path:
            return Path(snapshot_download(hub_id, allow_patterns=[glob.escape(name) for name in names], **wanted))

        folder = fetch(name for name in listing if is_side_file(name, sizes[name]))
        single, index = next((pair for pair in WEIGHTS if {*pair} & {*listing}), WEIGHTS[0])
        if weights and single in listing:
            fetch([single])
        elif weights and index in listing:
            fetch([index])
            fetch(weight_map(folder / index).values())
        return Source(folder, hub_id, listing=listing)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"{shown(hub_id)}: there is no such folder, and it could not be fetched from the Hugging Face Hub: "
            f"{_reason(error, hub.get('revision'))}"
        ) from error


def _reason(error: Exception, revision: str | None) -> str:
    """Why a download failed, and what helps."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "its owner must grant you access first; ask for it on the repo's page, then log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {shown(revision)}; name a branch, a tag or a commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repo; check the name or, if it is private, your access to it (`hf auth login`)"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache does not have it; unset it, or name a folder"
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError):
        return f"{constants.ENDPOINT} cannot be reached, and the cache does not have it; are you offline?"
    return f"{type(error).__name__}; check the name, the connection, and your access to it"
