"""The settings of a fresh model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """The settings of a fresh model.

    Attributes:
        topology: "decoder", "encoder" or "encoder_decoder".
        settings: ours; a function makes a value of the others.
    """

    topology: str
    settings: Mapping[str, Any]
