"""How one checkpoint of a family is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..rules.operations import Shape


@dataclass(frozen=True)
class CheckpointVariant:
    """How one checkpoint of a family is written, as far as `config.json` does not say it.

    Attributes:
        head: name of the official class that its tensors make.
        traits: which of several spellings its names have, and which optional tensors are there; the family's own words.
        sizes: shapes of tensors that are stored next to the weights, which go back only where they still fit.
    """

    head: str
    traits: frozenset[str] = frozenset()
    sizes: Mapping[str, Shape] = field(default_factory=dict)
