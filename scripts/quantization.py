"""Run the tests of the extra `quantization` in an environment of its own: transformers imports torchao wherever it is.

Usage: python scripts/quantization.py [--fresh] [PYTEST_ARGUMENT ...]
"""

import os
import subprocess
import sys

from environments import ROOT, build

REQUIREMENTS = ["bitsandbytes", "optimum-quanto", "torchao", "-c", str(ROOT / "constraints.txt")]


def main() -> int:
    arguments = sys.argv[1:]
    if set(arguments) & {"-h", "--help"}:
        print(__doc__)
        return 0
    python = build("quantization", REQUIREMENTS, fresh="--fresh" in arguments)
    given = [argument for argument in arguments if argument != "--fresh"]
    command = [python, "-m", "pytest", "-q", "tests/test_quantization.py", *given]
    return subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
