"""Find a checkpoint: a folder, a repo on the Hugging Face Hub (fetched into the Hub's cache), or one file."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import ConversionError, shown

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "conversion.json",
)
SENTENCE_FILES = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]*_*/config.json",
    "[0-9]*_Dense/pytorch_model.bin",
)
"""What `sentence-transformers` reads besides the model, as names and patterns of names."""
SAFETENSORS = ("*.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")

PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
WEIGHT_FILES = (*PICKLED_SUFFIXES, ".safetensors")


@dataclass(frozen=True)
class Source:
    """What a conversion reads.

    Attributes:
        path: a folder, or one weight file.
        hub_id: its Hub id, if it was fetched.
        config: the JSON file with the settings of a weight file.
    """

    path: Path
    hub_id: str | None = None
    config: Path | None = None

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
        ConversionError: it is neither, or a folder of which a revision is asked for.
    """
    text = os.fspath(source)
    folder = Path(text)
    if folder.is_dir():
        if revision is not None:
            raise ConversionError(f"{text}: a folder, which has no revision {shown(revision)}; leave it out")
        return folder
    if os.path.lexists(folder):
        raise ConversionError(f"{text}: not a folder; name the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(text) or ".." in text:
        raise ConversionError(f"{text}: no such folder")
    return None


def locate(source: str | PathLike[str], weights: bool = True, **hub: Any) -> tuple[Path, str | None]:
    """The folder of a checkpoint, and its Hub id if it was one. An existing folder takes precedence.

    Args:
        source: a folder or a Hub id such as "Qwen/Qwen3-0.6B".
        weights: also fetch the weights.
        hub: for a Hub id: `revision`, `token` and `cache_dir`, as `huggingface_hub.snapshot_download` takes them.

    Raises:
        ConversionError: there is no such folder or repo, or it cannot be fetched.
    """
    folder = folder_of(source, hub.get("revision"))
    return (folder, None) if folder is not None else (_fetch(os.fspath(source), weights, hub), os.fspath(source))


def _fetch(hub_id: str, weights: bool, hub: Mapping[str, Any]) -> Path:
    """Download the known files of a repo; anything else, code included, is not fetched."""
    from huggingface_hub import snapshot_download

    try:
        patterns = [*TEXT_FILES, *SENTENCE_FILES, *(SAFETENSORS if weights else ())]
        folder = Path(snapshot_download(hub_id, allow_patterns=patterns, **hub))
        if weights and not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(hub_id, allow_patterns=[*TEXT_FILES, *SENTENCE_FILES, *PICKLED], **hub))
    except Exception as error:
        raise ConversionError(
            f"{shown(hub_id)}: there is no such folder, and it could not be fetched from the Hugging Face Hub: "
            f"{_reason(error, hub.get('revision'))}"
        ) from error
    return folder


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
