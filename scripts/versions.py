"""Run the tests marked `versions` on the oldest supported releases of transformers, each in an environment of its own.

The environments live in .venvs/ and see everything of the environment that runs this script (torch, pytest, this
package); only transformers, and what its older release needs otherwise, is installed into them.

Usage: python scripts/versions.py [--fresh] [VERSION ...] [-- PYTEST_ARGUMENT ...]
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import xml.etree.ElementTree as ElementTree  # nosec B405 # of a report that we had written
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("5.5.0", "5.10.4")


def build(version: str, fresh: bool) -> Path:
    """Make the environment for one version of transformers and return its python.

    Args:
        version: a release of transformers.
        fresh: build it anew even where it stands.
    """
    folder = ROOT / ".venvs" / f"transformers-{version}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    if ready.exists():
        return python
    print(f"making {folder.relative_to(ROOT)} (once)", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    # `addsitedir` rather than a bare path: it also follows the .pth files over there, so the editable install is seen.
    # The old packages stand in this environment's own folder, which comes first on the path.
    base = sysconfig.get_paths()["purelib"]
    (site_packages / "first_environment.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"transformers=={version}"],
        check=True,
    )
    ready.touch()
    return python


def run_tests(version: str, python: Path, arguments: list[str]) -> dict[str, object]:
    """Run the marked tests with one environment's python; return what came of them."""
    found = subprocess.run(
        [python, "-c", "import transformers; print(transformers.__version__)"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout.strip()  # fmt: skip
    if found != version:
        raise SystemExit(f"the environment for transformers {version} imports {found}: run again with --fresh")
    report = ROOT / ".venvs" / f"report-{version}.xml"
    report.unlink(missing_ok=True)
    start = time.perf_counter()
    code = subprocess.run(
        [python, "-m", "pytest", "-m", "versions", "-q", f"--junit-xml={report}", *arguments], cwd=ROOT, check=False
    ).returncode
    row: dict[str, object] = {"version": version, "seconds": time.perf_counter() - start, "code": code}
    root = ElementTree.parse(report).getroot() if report.exists() else None  # nosec B314 # the same
    suite = root.find("testsuite") if root is not None else None
    for name in ("tests", "failures", "errors", "skipped"):
        row[name] = int(suite.get(name, "0")) if suite is not None else 0
    return row


def main() -> int:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--fresh", action="store_true", help="build the environments anew")
    options = parser.parse_args(arguments[:split])

    rows = []
    for version in options.versions:
        rows.append(run_tests(version, build(version, options.fresh), arguments[split + 1 :]))
    print(f"\n{'transformers':<14}{'tests':>7}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for row in rows:
        failed = row["failures"] + row["errors"]
        print(f"{row['version']:<14}{row['tests']:>7}{failed:>8}{row['skipped']:>9}{row['seconds']:>9.1f}")
    # pytest's 5 means that nothing was collected, which would make this command prove nothing
    return max(int(row["code"] != 0) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
