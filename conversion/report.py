"""The result of a conversion."""

from dataclasses import dataclass

from blockformer.publishing.write_repo import RepoReport

from .verify import Parity


@dataclass
class ConversionReport(RepoReport):
    """The result of a conversion.

    Attributes:
        source: the folder or Hub id read.
        family: the official family; "" where none is involved.
        to_official: whether the target is in the official layout.
        parity: the comparison with the source, or None if there was none.
    """

    family: str = ""
    to_official: bool = False
    parity: Parity | None = None

    @property
    def not_verified(self) -> str:
        """Why a comparison that was wanted proved nothing; "" where it did, or where none was wanted."""
        return "" if self.parity is None else self.parity.why_not_verified

    def compared(self, start: str) -> str:
        """What the card says of the comparison: after this start a line for each figure, or why it has none."""
        if self.parity is None:
            return "Not compared: the conversion ran without verification."
        if self.not_verified:
            return f"**Not verified:** {self.not_verified}."
        return "\n".join([start, "", *(f"- {line}" for line in (*self.parity.measured, *self.parity.notes))])
