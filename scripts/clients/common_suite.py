"""transformers' own model tests, run on our classes and on its own classes of the same kind.

The tests come from the source archive on PyPI, which ships `tests/test_modeling_common.py` and its neighbours; they are
fetched into .venvs/ and never become part of this project. The archive lacks the generation and export tests, and those
of each model: `common_suite_tests.py` makes testers for both sides with the same inputs.

Prints one line of JSON for each kind of model, with what passed and failed on either side.

Usage: python scripts/clients/common_suite.py [KIND ...] [--verbose]
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from environments import ROOT, build

TESTS = Path(__file__).with_name("common_suite_tests.py")
KINDS = {
    "bert": "BERT-like encoder, all heads",
    "gpt2": "GPT-2-like decoder",
    "qwen3": "Qwen3-like decoder",
    "t5": "T5-like encoder-decoder",
    "bart": "BART-like encoder-decoder",
    "bert_decoder": "BERT decoder with cross-attention",
}
LEFT_OUT = {
    "__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
"""What the archive's tests import and the archive does not hold: empty stand-ins."""
DELIBERATE = {"test_model_rope_scaling_frequencies": "rotary tables are laid out for one product less"}
"""Where ours fail on purpose, and why: see docs/reliability.md."""
THEIRS = {
    "test_inputs_embeds": "the official classifiers of T5 and BART refuse inputs_embeds",
    "test_model_base_model_prefix": "the official T5 keeps its parts beside the head",
}
"""Where theirs fail (their own testers skip these), and why."""


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


def run(python: Path, sources: Path, kind: str, side: str, verbose: bool) -> dict[str, str]:
    """Run the tests of one kind on one side: test name -> "passed", "failed" or "skipped"."""
    report = sources.parent / f"{kind}-{side}.json"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "COMMON_SUITE": str(sources), "COMMON_SUITE_REPORT": str(report),
    }  # fmt: skip
    command = [python, TESTS, "-k", f"{kind}_{side}", "-q", "--tb=short" if verbose else "--tb=no"]
    out = None if verbose else subprocess.DEVNULL
    status = subprocess.run(command, check=False, env=environment, stdout=out, stderr=out, cwd=sources).returncode
    outcomes = json.loads(report.read_text()) if report.exists() else {}
    if not outcomes:
        raise SystemExit(f"pytest ended with {status} and ran nothing: run again with --verbose")
    return outcomes


def counted(outcomes: dict[str, str]) -> str:
    """ "N passed, M failed". Skipped tests (no GPU, not for this kind of model) are left out."""
    values = list(outcomes.values())
    return f"{values.count('passed')} passed, {values.count('failed')} failed"


def compare(kind: str, version: str, ours: dict[str, str], theirs: dict[str, str]) -> tuple[dict, list[str]]:
    """A row of the table, and the tests that ours alone fail without a reason."""
    our_failures, their_failures = (
        sorted(name for name, outcome in outcomes.items() if outcome == "failed") for outcomes in (ours, theirs)
    )
    alone = [name for name in our_failures if name not in their_failures]
    notes = [f"{name}: {DELIBERATE.get(name, 'ours alone fails')}" for name in alone]
    notes += [f"{name}: {THEIRS.get(name, 'theirs fails')}" for name in their_failures]
    wrong = [name for name in alone if name not in DELIBERATE]
    row = {"client": "transformers test suite", "version": version, "job": KINDS[kind]}
    row |= {"ours": counted(ours), "theirs": counted(theirs), "same": not wrong, "note": "; ".join(notes)}
    return row, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--verbose", action="store_true", help="show pytest's output")
    options = parser.parse_args()
    version = metadata.version("transformers")
    sources = fetch(version)
    python = build("common-suite", ["parameterized"])
    worst = 0
    for kind in options.kinds or KINDS:
        ours, theirs = (run(python, sources, kind, side, options.verbose) for side in ("ours", "theirs"))
        row, wrong = compare(kind, version, ours, theirs)
        print(json.dumps(row), flush=True)
        worst |= bool(wrong)
    return worst


if __name__ == "__main__":
    sys.exit(main())
