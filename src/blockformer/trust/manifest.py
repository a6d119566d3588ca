"""The code of each release, by the SHA-256 of its files: what the code of a repo is compared with."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..declared_fields import of_the_package
from ..model.release import FORMAT, VERSION
from ..model_classes import CONFIGS
from ..publishing.repo_code import EXTRA_CODE, MODEL, OPTIONAL, STAND_IN, topology_files

FOLDER = Path(__file__).parent / "manifests"


@dataclass(frozen=True)
class Manifest:
    """The code that a release writes into repos.

    Attributes:
        release: its version.
        format: of the repos that it writes.
        files: name -> SHA-256, in hexadecimal, of every file that a repo of the release may have.
        topologies: `model_type` -> the names that each such repo has.
        stand_ins: name -> SHA-256 of the file that a repo has under that name if its model does not use the part.
    """

    release: str
    format: int
    files: dict[str, str]
    topologies: dict[str, list[str]]
    stand_ins: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """As it lies in `manifests/`."""
        return json.dumps(vars(self), indent=1, sort_keys=True) + "\n"


def installed() -> Manifest:
    """The manifest of the installed package, from its own files."""
    topologies = {each.model_type: [path.name for path in topology_files(each)] for each in CONFIGS.values()}
    names = {name for each in topologies.values() for name in each}
    names |= {"blocks.py"}.union(*(block.digests for block in of_the_package()))  # which only some repos have
    paths = {name: MODEL / name for name in names} | EXTRA_CODE
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(paths.items())}
    stand_in = hashlib.sha256(STAND_IN.read_bytes()).hexdigest()
    return Manifest(VERSION, FORMAT, sums, topologies, {f"{name}.py": stand_in for name in OPTIONAL})


def manifest_of(release: str) -> Manifest | None:
    """The manifest of a release that this package knows. That of a release in the making is the package itself."""
    path = FOLDER / f"{release}.json"
    if path.name in {each.name for each in FOLDER.glob("*.json")}:
        return Manifest(**json.loads(path.read_text(encoding="utf-8")))
    return installed() if release == VERSION else None


def is_later(release: str) -> bool:
    """Whether a release is later than this package."""
    this, other = ([int(part) for part in re.findall(r"\d+", each)[:3]] for each in (VERSION, release))
    return other > this
