"""How one checkpoint of a family is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..rules.operations import Shape


@dataclass(frozen=True)
class CheckpointVariant:
    """How one checkpoint of a family is written, as far as `config.json` does not say it.

    Attributes:
        head: name of the official class that its tensors make.
        traits: the names of the alternatives that its tensors show (`Names.alternatives`), and which optional tensors
            are there, in the family's own words (`Names.own_traits`).
        sizes: shapes of tensors that are stored next to the weights, which go back only where they still fit.
        prefix: what the names of all tensors begin with, of a weight file that is only read.
        note: what was found out about such a file, for its user; "" for nothing.
    """

    head: str
    traits: frozenset[str] = frozenset()
    sizes: Mapping[str, Shape] = field(default_factory=dict)
    prefix: str = ""
    note: str = ""
