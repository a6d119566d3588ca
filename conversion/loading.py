"""Load any checkpoint, official or ours, as a model of ours in memory."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .converting import from_official, load_ours
from .errors import ConversionError
from .files.checkpoint import read_config
from .files.side_files import refuse_adapters
from .files.sources import locate
from .files.tokenizers import LOCAL, check_readable, has_tokenizer, is_panic
from .plan import is_ours, parse_dtype


def load_any(
    src: str | PathLike[str], dtype: str | torch.dtype | None = None, revision: str | None = None
) -> tuple[PreTrainedModel, Path]:
    """A model in evaluation mode, and the folder that it lies in.

    Args:
        src: a folder or Hub id, in an official layout or ours.
        dtype: "float32", "bfloat16" or "float16"; None keeps the checkpoint's.
        revision: of a Hub id, a branch, tag or commit.

    Raises:
        ConversionError: see `from_official`.
    """
    folder = locate(src, revision=revision).path
    refuse_adapters(folder)
    return load_folder(folder, read_config(folder / "config.json"), None, dtype), folder


def load_tokenizer(src: str, folder: Path, needed: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder.

    Args:
        src: the user's name for the model.
        folder: the model's.
        needed: what an error adds where there is none, such as who needs it.

    Raises:
        ConversionError: there is none, or it cannot be loaded.
    """
    if not has_tokenizer(folder):
        raise ConversionError(f"{src}: the model has no tokenizer{needed}")
    check_readable(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        tokenizer.decode(tokenizer("Hello world!").input_ids)  # damaged data may only show when it is used
        return tokenizer
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = str(error) or type(error).__name__
        raise ConversionError(f"{src}: the tokenizer cannot be loaded: {reason}") from error


def load_folder(folder: Path, entries: Mapping[str, Any], family: str | None, dtype: Any) -> PreTrainedModel:
    """The model of a folder, by the entries of its `config.json`."""
    if not is_ours(entries):
        return from_official(folder, dtype, family)
    return load_ours(folder, entries, parse_dtype(dtype))
