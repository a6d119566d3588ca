"""Generation settings. Older checkpoints keep them in `config.json`, without a file of their own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from ..errors import ConversionError
from ..quiet import quiet
from .checkpoint import NEVER_FOLLOWED, read_json

FILE = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def settings_in(folder: Path, entries: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """What transformers would use for a checkpoint: its own file, or the generation entries of `config.json`.

    Args:
        folder: the checkpoint.
        entries: its `config.json`.
        config: ours, whose token ids are checked.

    Raises:
        ConversionError: transformers refuses them.
    """
    if (folder / FILE).is_file():
        return read_json(folder / FILE)
    followed = {name: value for name, value in entries.items() if name not in NEVER_FOLLOWED}
    try:
        with quiet():
            made = GenerationConfig.from_model_config(followed).to_json_string(ignore_metadata=True)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConversionError(f"config.json: GenerationConfig refuses its settings of generation: {reason}") from error
    settings = json.loads(made)
    settings |= {name: getattr(config, name, None) for name in TOKENS if name in settings}
    return {name: value for name, value in settings.items() if value is not None}
