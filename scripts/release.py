"""Check that a tag is the version of this checkout, has its section in CHANGELOG.md and a manifest; print the section.

The manifest has the sums of the code that this release writes into repos; `blockformer verify` compares with it.

Usage: python scripts/release.py v0.1.0
       python scripts/release.py --manifest     writes src/blockformer/trust/manifests/0.1.0.json (needs the package)
"""

import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version() -> str:
    """The version of the checkout, from the one place where it stands."""
    text = (ROOT / "src" / "blockformer" / "model" / "release.py").read_text(encoding="utf-8")
    found = re.search(r'^VERSION = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit("src/blockformer/model/release.py has no VERSION")
    return found[1]


def notes(wanted: str, changelog: str) -> str:
    """The section of a version; a release's heading names its date: `## 0.1.0 (2026-11-30)`.

    Raises:
        SystemExit: there is no such section, it has no date, or it is empty.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, body = section.partition("\n")
        if heading.split()[0] != wanted:
            continue
        if not re.fullmatch(r"\S+ \(\d{4}-\d\d-\d\d\)", heading.strip()):
            raise SystemExit(f"CHANGELOG.md: the heading '{heading.strip()}' needs a date: ## {wanted} (YYYY-MM-DD)")
        if not body.strip():
            raise SystemExit(f"CHANGELOG.md: the section of {wanted} is empty")
        return body.strip() + "\n"
    raise SystemExit(f"CHANGELOG.md has no section '## {wanted} (YYYY-MM-DD)'")


def manifest(wanted: str) -> Path:
    """The manifest of a version."""
    return ROOT / "src" / "blockformer" / "trust" / "manifests" / f"{wanted}.json"


def check_manifest(wanted: str) -> None:
    """Compare a version's manifest with the files of the checkout.

    Raises:
        SystemExit: it is missing, or a file is not as it says.
    """
    path = manifest(wanted)
    if not path.exists():
        raise SystemExit(f"{path.relative_to(ROOT)} is missing: python scripts/release.py --manifest writes it")
    for name, digest in json.loads(path.read_text(encoding="utf-8"))["files"].items():
        file = ROOT / "src" / "blockformer" / "model" / name
        if "/" not in name and hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise SystemExit(f"{file.relative_to(ROOT)} is not as its manifest says: write the manifest again")


def main() -> None:
    if sys.argv[1:] == ["--manifest"]:
        from blockformer.trust.manifest import installed

        manifest(version()).parent.mkdir(exist_ok=True)
        manifest(version()).write_text(installed().text(), encoding="utf-8")
        return
    if len(sys.argv) != 2 or not sys.argv[1].startswith("v"):
        raise SystemExit(__doc__)
    tagged, here = sys.argv[1][1:], version()
    if tagged != here:
        raise SystemExit(f"the tag is v{tagged}, and src/blockformer/model/release.py says {here}")
    check_manifest(here)
    print(notes(here, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), end="")


if __name__ == "__main__":
    main()
