"""Load any checkpoint, official or ours, as a Blockformer model in memory."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockformer.files.errors import ConversionError, is_failure
from blockformer.files.sources import Reading, locate
from blockformer.files.tokenizers import check_readable, has_tokenizer, read

from .converting import from_official
from .options import check_reading

if TYPE_CHECKING:
    from typing_extensions import Unpack


def load_any(
    src: str | PathLike[str], dtype: str | torch.dtype | None = None, **reading: "Unpack[Reading]"
) -> tuple[PreTrainedModel, Path]:
    """A model in evaluation mode, and the folder that it lies in.

    Args:
        src: a folder or Hub id, in an official layout or ours.
        dtype: see `from_official`.
        reading: which files are read, and from where; see `convert`.

    Raises:
        ConversionError: see `from_official`.
    """
    check_reading("load_any", reading)
    place = locate(src, **reading)
    return from_official(place.path, dtype, **place.loading), place.path


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
        tokenizer = read(folder)
        tokenizer.decode(tokenizer("Hello world!").input_ids)  # damaged data may only show when it is used
        return tokenizer
    except BaseException as error:
        if not is_failure(error):
            raise
        reason = str(error) or type(error).__name__
        raise ConversionError(f"{src}: the tokenizer cannot be loaded: {reason}") from error
