"""Run the tests marked `versions` on every supported release of transformers that is tested, and print the table.

All but the installed one get environments of their own in .venvs/, which see everything of the environment that runs
this script (torch, pytest, this package); only transformers, and what that release needs otherwise, is installed there.
The installed release comes last. `--torch 2.6.0` runs them with that PyTorch and the installed transformers instead;
its wheels take several gigabytes.

Usage: python scripts/versions.py [--quick] [--fresh] [--torch] [VERSION ...] [-- PYTEST_ARGUMENT ...]
"""

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree  # nosec B405 # of a report that we had written
from importlib import metadata
from pathlib import Path

from environments import AS_LIBRARIES_WARN, ONE_THREAD, ROOT, build

VERSIONS = ("5.5.0", "5.10.4", "5.23.0")
COLUMNS = ("transformers", "huggingface_hub", "torch")
QUICK = (
    "tests/test_hub.py::test_each_revision_has_its_own_weights_elsewhere",
    "tests/test_hub.py::test_nothing_of_a_hub_repo_is_fetched_or_run_without_trust",
    "tests/test_remote_code.py",
    "tests/test_museum.py",
    "tests/test_generation.py::test_greedy",
    "tests/model/test_compat.py",
    "tests/model/test_modeling_decoder.py",
    "tests/model/test_modeling_encoder_decoder.py",
    "tests/engine/test_beams.py",
    "tests/model/test_awq_linear.py",
    "tests/conversion/test_families.py",
    "tests/conversion/test_t5_families.py",
)
"""Some of each kind, for CI: remote code, repos of every release, generation, parity, offload."""


def run_tests(library: str, version: str, python: str | Path, arguments: list[str]) -> dict[str, object]:
    """Run the marked tests with one environment's python, which has this release; return the result."""
    names = ", ".join(COLUMNS)
    code = f"import {names}; print(*(module.__version__ for module in ({names})))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    row: dict[str, object] = dict(zip(COLUMNS, found, strict=True))
    if str(row[library]).partition("+")[0] != version:
        raise SystemExit(f"the environment for {library} {version} imports {row[library]}: run again with --fresh")
    report = ROOT / ".venvs" / f"report-{library}-{version}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    start = time.perf_counter()
    status = subprocess.run(
        [python, "-m", "pytest", "-m", "versions", "-q", "--environment=versions", *AS_LIBRARIES_WARN,
         f"--junit-xml={report}", *arguments],
        cwd=ROOT, check=False, env={**os.environ, **ONE_THREAD},
    ).returncode  # fmt: skip
    row |= {"seconds": time.perf_counter() - start, "code": status}
    root = ElementTree.parse(report).getroot() if report.exists() else None  # nosec B314 # the same
    suite = root.find("testsuite") if root is not None else None
    for name in ("tests", "failures", "errors", "skipped"):
        row[name] = int(suite.get(name, "0")) if suite is not None else 0
    return row


def main() -> int:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: those tested, and the installed one")
    parser.add_argument("--quick", action="store_true", help="a few tests, on the oldest and the newest release")
    parser.add_argument("--torch", action="store_true", help="the versions are PyTorch's")
    parser.add_argument("--fresh", action="store_true", help="rebuild the environments")
    options = parser.parse_args(arguments[:split])
    given = arguments[split + 1 :]
    if options.quick:
        given = [*QUICK, *given]
    elif not given:
        given = ["--numprocesses=auto", "--maxprocesses=4"]
    library = "torch" if options.torch else "transformers"
    installed = metadata.version(library).partition("+")[0]
    if options.torch and not options.versions:
        parser.error("name the versions of PyTorch: --torch 2.6.0")
    usual = (VERSIONS[0], VERSIONS[-1]) if options.quick else (*VERSIONS, installed)
    versions = options.versions or dict.fromkeys(usual)

    rows = []
    for version in versions:
        python = (
            sys.executable
            if version == installed
            else build(f"{library}-{version}", [f"{library}=={version}"], options.fresh)
        )
        rows.append(run_tests(library, version, python, given))
    print(
        f"\n{'transformers':<14}{'huggingface_hub':<17}{'torch':<14}{'tests':>6}{'failed':>8}{'skipped':>9}{'seconds':>9}"
    )
    for row in rows:
        failed = row["failures"] + row["errors"]
        print(
            f"{row['transformers']:<14}{row['huggingface_hub']:<17}{row['torch']:<14}"
            f"{row['tests']:>6}{failed:>8}{row['skipped']:>9}{row['seconds']:>9.1f}"
        )
    # pytest's 5 means that nothing was collected, which would make this command prove nothing
    return max(int(row["code"] != 0) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
