"""The result of a conversion."""

from dataclasses import dataclass, field
from pathlib import Path

from .verify import Parity


@dataclass
class ConversionReport:
    """The result of a conversion.

    Attributes:
        source: the folder or Hub id read.
        target: the folder created.
        family: the official family.
        to_official: whether the target is in the official layout.
        tensors: number of tensors written.
        nbytes: their size in bytes.
        dtypes: their dtypes, largest share first.
        seconds: wall-clock time.
        parity: the comparison with the source, or None if there was none.
        notes: findings the user should know of.
        has_tokenizer: whether the source has a tokenizer (an article's weight file needs none).
        left_out: reason -> names of files of the source that were not carried.
    """

    source: str
    target: Path
    family: str
    to_official: bool
    tensors: int = 0
    nbytes: int = 0
    dtypes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    parity: Parity | None = None
    notes: list[str] = field(default_factory=list)
    has_tokenizer: bool = True
    left_out: dict[str, list[str]] = field(default_factory=dict)

    @property
    def not_verified(self) -> str:
        """Why a comparison that was wanted proved nothing; "" where it did, or where none was wanted."""
        return "" if self.parity is None else self.parity.why_not_verified
