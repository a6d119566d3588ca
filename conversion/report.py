"""What a conversion reports to its caller: progress, and a report at the end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .verify import Parity

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0: not known)."""


@dataclass
class ConversionReport:
    """What a conversion did.

    Attributes:
        source: the folder or Hub id that was read.
        target: the folder that was made.
        family: the official family.
        to_official: the direction.
        tensors: how many were written.
        nbytes: bytes of their data.
        dtypes: their dtypes, the most bytes first.
        seconds: wall-clock time.
        parity: the comparison with the source, or None if there was none.
        notes: what a user should know.
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
