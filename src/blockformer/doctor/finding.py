"""What a diagnosis is made of: findings, each with how bad it is and what to do about it."""

import json
from collections.abc import Iterable, Mapping, Sized
from dataclasses import asdict, dataclass, field
from typing import Any

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
"""What no library loads correctly, what one may load wrongly, and what is only worth knowing."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and what it counts: "1 matrix", "2 matrices"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def are(things: Sized) -> str:
    """The verb for so many things."""
    return "is" if len(things) == 1 else "are"


def entries_set(entries: Mapping[str, Any]) -> list[str]:
    """The lines on entries of `config.json` that are set, for the changes of a diagnosis."""
    return [f"config.json: {name} set to {json.dumps(value)}" for name, value in entries.items()]


@dataclass(frozen=True)
class Finding:
    """One thing that is unusual about a checkpoint.

    Attributes:
        kind: what it is about, in one word that does not change between releases: "prefix", "missing", ...
        severity: one of `SEVERITIES`.
        sentence: what was found.
        remedy: what to do; "" where nothing needs to be done.
        is_mended: whether `mend` puts it right by itself.
        names: tensors or entries that it is about.
    """

    kind: str
    severity: str
    sentence: str
    remedy: str = ""
    is_mended: bool = False
    names: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether it is an error that `mend` does not put right."""
        return self.severity == ERROR and not self.is_mended


@dataclass
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        source: the folder or file, as it was named.
        what: in one sentence: how it is stored, of which family, how large.
        family: the official family; None if it is unknown, or the model is one of Blockformer's own layout.
        tensors, nbytes: of the checkpoint.
        dtypes: dtype -> number of tensors.
        findings: the worst first.
        changes: what `mend` would change, or has changed.
        is_mendable: whether `mend` can write a whole checkpoint of it.
    """

    source: str
    what: str = ""
    family: str | None = None
    tensors: int = 0
    nbytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    is_mendable: bool = False

    @property
    def is_healthy(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return all(each.severity == NOTE for each in self.findings)

    @property
    def status(self) -> int:
        """The exit status of the command: 0 healthy, 1 with an error, 3 with warnings only."""
        worst = {each.severity for each in self.findings}
        return 1 if ERROR in worst else 3 if WARNING in worst else 0

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings, and keep the worst first."""
        new = [each for each in findings if each not in self.findings]
        self.findings = sorted([*self.findings, *new], key=lambda each: SEVERITIES.index(each.severity))

    def as_json(self) -> dict[str, Any]:
        """The diagnosis as plain values for JSON."""
        return {"healthy": self.is_healthy, "status": self.status, **asdict(self)}
