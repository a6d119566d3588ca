"""transformers' own model tests, run on our classes and on its own classes of the same kind.

The common tests come from the source archive on PyPI, which ships `tests/test_modeling_common.py` and its neighbours,
and those of generation, which it lacks, from the same release on GitHub; they are fetched into .venvs/ and never become
part of this project. The tests of each model are left out: `common_suite_tests.py` makes testers for both sides, with
the same inputs. So are the export tests.

Prints one line of JSON for each test of each kind of model, with what it said on either side.

Usage: python scripts/clients/common_suite.py [KIND ...] [--without-generation] [--verbose]

Where GitHub is out of reach, GENERATION_TESTS may name a copy of transformers' tests/generation/test_utils.py.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from environments import ROOT, build

TESTS = Path(__file__).with_name("common_suite_tests.py")
KINDS = {
    "bert": "BERT-like encoder, all heads",
    "gpt2": "GPT-2-like decoder",
    "qwen3": "Qwen3-like decoder",
    "qwen3_moe": "Qwen3-like decoder with experts",
    "t5": "T5-like encoder-decoder",
    "bart": "BART-like encoder-decoder",
    "bert_decoder": "BERT decoder with cross-attention",
}
LEFT_OUT = {
    "__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
"""What the archive's tests import and the archive does not hold: empty stand-ins."""
GENERATION = "generation/test_utils.py"
NO_GENERATION = "class GenerationTesterMixin:\n    pass\n"
ADDRESS = "https://raw.githubusercontent.com/huggingface/transformers/v{version}/tests/{name}"
NOT_THERE = "not there"


def fetch(version: str) -> Path:
    """The folder of the source archive of transformers in .venvs/, with its tests, fetched once."""
    folder = ROOT / ".venvs" / "transformers-sources"
    archive, sources = folder / f"transformers-{version}.tar.gz", folder / f"transformers-{version}"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-build-isolation", "--no-binary", ":all:", "--dest", folder, f"transformers=={version}"]
        subprocess.run(command, check=True)
    if not sources.exists():
        with tarfile.open(archive) as tar:
            wanted = [member for member in tar if member.name.startswith(f"{sources.name}/tests/")]
            tar.extractall(folder, wanted, filter="data")
    for name, text in LEFT_OUT.items():
        path = sources / "tests" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(text)
    return sources


def put_generation_tests(sources: Path, version: str, left_out: bool) -> None:
    """Put the generation tests next to the others, fetched once; an empty stand-in where they are left out.

    Raises:
        SystemExit: they cannot be fetched.
    """
    path, cached = sources / "tests" / GENERATION, sources.parent / f"generation-{version}.py"
    path.parent.mkdir(exist_ok=True)
    if left_out:
        path.write_text(NO_GENERATION)
        return
    if given := os.environ.get("GENERATION_TESTS"):
        shutil.copyfile(given, path)
        return
    if not cached.exists():
        address = ADDRESS.format(version=version, name=GENERATION)
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:  # nosec B310 # https, of a host named above
                cached.write_bytes(answer.read())
        except OSError as error:
            fix = "set GENERATION_TESTS to a copy of that file, or leave its tests out with --without-generation"
            raise SystemExit(f"cannot fetch {address} ({error}): {fix}") from error
    shutil.copyfile(cached, path)


def run(python: Path, sources: Path, kind: str, side: str, verbose: bool) -> dict[str, str]:
    """Run the tests of one kind on one side: test name -> "works", "skipped: ..." or how its error begins."""
    report = sources.parent / f"{kind}-{side}.json"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "COMMON_SUITE": str(sources), "COMMON_SUITE_REPORT": str(report),
    }  # fmt: skip
    command = [python, TESTS, "-k", f"{kind}_{side}_Test", "-q", "--tb=short" if verbose else "--tb=no"]
    status = subprocess.run(command, check=False, env=environment, stdout=sys.stderr, cwd=sources).returncode
    outcomes = json.loads(report.read_text()) if report.exists() else {}
    if not outcomes:
        raise SystemExit(f"pytest ended with {status} and ran nothing")
    return outcomes


def rows_of(kind: str, version: str, ours: dict[str, str], theirs: dict[str, str]) -> list[dict]:
    """A row for each test that is not skipped on both sides."""
    found = []
    for name in sorted({**ours, **theirs}):
        said = {"ours": ours.get(name, NOT_THERE), "theirs": theirs.get(name, NOT_THERE)}
        if not all(each.startswith("skipped") for each in said.values()):
            row = {"client": "transformers test suite", "version": version, "job": name, "model": kind}
            found.append({**row, **said, "difference": 0.0})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--without-generation", action="store_true", help="leave the tests of generation out")
    parser.add_argument("--verbose", action="store_true", help="show where tests fail")
    options = parser.parse_args()
    version = metadata.version("transformers")
    sources = fetch(version)
    put_generation_tests(sources, version, options.without_generation)
    python = build("common-suite", ["parameterized"])
    for kind in options.kinds or KINDS:
        ours, theirs = (run(python, sources, kind, side, options.verbose) for side in ("ours", "theirs"))
        for row in rows_of(kind, version, ours, theirs):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
