"""What a verification found."""

from dataclasses import dataclass, field


@dataclass
class Verification:
    """What `verify` found.

    Attributes:
        repo: the folder or Hub id.
        release: the release that wrote the repo, as its `config.json` says; None if it says nothing.
        format: of the repo, as its `config.json` says.
        files: name -> SHA-256, in hexadecimal, of every file.
        problems: kind of check -> what is wrong, one sentence each. The kinds: "files", "code", "settings", "weights",
            "unused" (weights that the model does not have), "signature".
        blocks: name -> SHA-256 of each block from outside: code of the repo's author's that the config names.
        to_read: the blocks that are not registered in this process: nothing vouches for what they do.
        weights_compared: whether the weights' names and shapes were compared with the config; if not, `notes` says why.
        notes: what was not checked, and why.
    """

    repo: str
    release: str | None = None
    format: int | None = None
    files: dict[str, str] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    to_read: list[str] = field(default_factory=list)
    weights_compared: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong, and no code is left to read."""
        return not self.problems and not self.to_read

    def add(self, kind: str, problem: str) -> None:
        """Note a problem."""
        self.problems.setdefault(kind, []).append(problem)
