"""The repos of `2026-11-20/` with the code that they were written with.

`code.zip` has the modules that commit 06807a4 wrote when it loaded these repos and exported them; every config and all
weights came out the same. All repos share them except the modeling module, which `auto_map` names. `where.json` says
where that code computes the logits to the bit.
"""

import json
import shutil
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent / "2026-11-20"
REPOS = sorted(path.parent for path in FOLDER.glob("*/config.json"))
WHERE = json.loads((FOLDER / "where.json").read_text())


def assemble(repo: Path, folder: Path) -> Path:
    """A repo as it was written: without the inputs and logits, and with its code."""
    home = folder / repo.name
    shutil.copytree(repo, home, ignore=shutil.ignore_patterns("expected.safetensors"))
    modules = {code.partition(".")[0] for code in json.loads((home / "config.json").read_text())["auto_map"].values()}
    with zipfile.ZipFile(FOLDER / "code.zip") as archive:
        names = archive.namelist()
        archive.extractall(
            home, [name for name in names if not name.startswith("modeling_") or name.removesuffix(".py") in modules]
        )
    return home
