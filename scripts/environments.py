"""Environments in addition to the first one, in .venvs/: they see all of it, and have other or more packages."""

import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AS_LIBRARIES_WARN = ("-W", "default", "-W", "error::pytest.PytestUnhandledThreadExceptionWarning")
"""For pytest, where packages of other versions warn of other things: only a thread that raises still fails its test."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""For the environment of tests: some compute with more threads, and one that waits must not spin on a busy core."""


def build(name: str, requirements: list[str], fresh: bool = False) -> Path:
    """Make an environment that sees everything of the one that runs this (torch, pytest, this package).

    Args:
        name: of its folder.
        requirements: what pip installs into it, with what these need otherwise.
        fresh: rebuild it even if it exists. It is rebuilt anyway when the requirements have changed.

    Returns:
        Its python.
    """
    folder = ROOT / ".venvs" / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    wanted = "\n".join(requirements)
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making {folder.relative_to(ROOT)} (once)", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    # `addsitedir` rather than a bare path: it also follows the .pth files over there, so the editable install is seen.
    # The other packages stand in this environment's own folder, which comes first on the path.
    base = sysconfig.get_paths()["purelib"]
    (site_packages / "first_environment.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], check=True
    )
    ready.write_text(wanted, encoding="utf-8")
    return python
