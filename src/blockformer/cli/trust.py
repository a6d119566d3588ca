"""`blockformer verify` and `blockformer upgrade`: what was checked, and what was found."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ..files.errors import printable
from .arguments import LocalFilesOnly, Revision

if TYPE_CHECKING:
    from blockformer.trust import Verification

CHECKS = {
    "files": "no pickles, and no links that leave the repo",
    "code": "{count} code files, all as in release {release}{others}",
    "settings": "no JSON file names other code to load, no chat template leaves its sandbox",
    "weights": "names and shapes match the config",
    "unused": "no weights that the model does not use",
    "signature": "every file is as it was signed with this key",
}
"""Kind of check -> the sentence where nothing is wrong."""


def verify(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="A folder or a Hub id.")],
    revision: Revision = None,
    local_files_only: LocalFilesOnly = False,
    key: Annotated[
        str | None, typer.Option(metavar="PUB", help="Fail unless the repo is signed with this public key (PEM).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the SHA-256 of each file.")] = False,
) -> None:
    """Check a Blockformer repo without running any of its code.

    Its code must be that of a release. It must not have pickles, or a setting that loads other code.

    Its weights must match the config. Exit status 1 if anything is wrong.
    """
    from blockformer.trust import verify as verified

    found = verified(repo, revision, key, local_files_only=local_files_only)
    if as_json:
        print(json.dumps({"ok": found.is_ok, **vars(found)}, indent=1))
    else:
        _show(found, key is not None)
    if not found.is_ok:
        raise SystemExit(1)


def upgrade(repo: Annotated[str, typer.Argument(metavar="REPO", help="The folder of a repo.")]) -> None:
    """Bring the code, config and card of an older repo up to this release; the weights stay as they are."""
    from blockformer.trust import upgrade as upgraded

    found = upgraded(repo)
    print(printable(f"{repo}: code, config and card are now as Blockformer {found.release} writes them"))
    _show(found, is_signed=False)


def _show(found: "Verification", is_signed: bool) -> None:
    release = f"Blockformer {found.release}, format {found.format}" if found.release else "an unknown release"
    print(printable(f"{found.repo}: written by {release}; {len(found.files)} files"))
    count = sum(name.endswith(".py") for name in found.files) - len(found.blocks) - bool(found.blocks)
    others = f"; {', '.join(found.blocks)}: of the repo's author" if found.blocks else ""
    for kind, sentence in CHECKS.items():
        if kind == "signature" and not is_signed:
            continue
        problems = found.problems.get(kind, [])
        said = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        good = sentence.format(count=count, release=found.release, others=others or ", and no others")
        if kind in ("weights", "unused") and not found.weights_compared:
            good = "not compared (see the note below)"
        print(f"{kind:10}{said if problems else good}")
        for problem in problems:
            print(printable(f"    {problem}"))
    for name in found.to_read:
        print(printable(f"to read   {name}, SHA-256 {found.files[name]}"))
        print("    a block that the repo's author wrote. Loading the repo with its own code runs it, and Blockformer")
        print("    cannot say what it does. Read it, then: blockformer --block FILE verify REPO")
    for note in found.notes:
        print(printable(f"note: {note}"))
