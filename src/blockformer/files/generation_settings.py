"""Generation settings. Older checkpoints keep them in `config.json`, without their own file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from .checkpoint import Checkpoint
from .config_file import NEVER_FOLLOWED
from .errors import ConversionError, reason_of
from .json_files import read_json
from .quiet import quiet

FILE = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def settings_in(checkpoint: Checkpoint, config: PretrainedConfig) -> dict[str, Any]:
    """What transformers would use for a checkpoint: its own file, or the generation entries of `config.json`.

    Args:
        checkpoint: whose own file counts, if it has one.
        config: ours, whose token ids are checked.

    Raises:
        ConversionError: transformers refuses them, or the file is a link that leaves the folder.
    """
    if not checkpoint.is_file and os.path.lexists(checkpoint.folder / FILE):
        return read_json(checkpoint.member(FILE))
    entries = config.to_dict() if checkpoint.is_file else checkpoint.config  # a weight file's settings have none
    followed = {name: value for name, value in entries.items() if name not in NEVER_FOLLOWED}
    try:
        with quiet():
            text = GenerationConfig.from_model_config(followed).to_json_string(ignore_metadata=True)
    except Exception as error:
        raise ConversionError(
            f"config.json: GenerationConfig refuses its settings of generation: {reason_of(error)}"
        ) from error
    settings = json.loads(text)
    settings |= {name: getattr(config, name, None) for name in TOKENS if name in settings}
    return {name: value for name, value in settings.items() if value is not None}


def as_loaded(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> GenerationConfig:
    """Settings of generation as `from_pretrained` has them.

    transformers saves those again although some mean nothing without others, such as a temperature without sampling; of
    settings that were made in another way it refuses that.

    Args:
        checkpoint: whose own file is loaded, if it has one.
        settings: of `settings_in`.

    Raises:
        ConversionError: transformers refuses them.
    """
    if not checkpoint.is_file and os.path.lexists(checkpoint.folder / FILE):
        return _loaded(checkpoint.folder)
    with quiet():
        return GenerationConfig.from_model_config(settings)


def check_settings(folder: Path) -> None:
    """Check that transformers takes the settings of generation in a folder, if it has a file of them.

    Raises:
        ConversionError: it does not, so the model could not be loaded.
    """
    if os.path.lexists(folder / FILE):
        read_json(folder / FILE)
        _loaded(folder)


def _loaded(folder: Path) -> GenerationConfig:
    try:
        with quiet():
            return GenerationConfig.from_pretrained(folder)
    except Exception as error:
        raise ConversionError(f"{FILE}: GenerationConfig refuses it: {reason_of(error)} Correct that entry") from error
