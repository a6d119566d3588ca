"""Fresh processes at the price of a fork: one helper has imported torch and transformers, which takes seconds.

Nothing of this package and no repo's code is in the helper, and a job's caches are empty: a child of it is what a new
interpreter is after those two imports.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from blockformer.demo import fresh

PROGRAMS = Path(__file__).parent / "programs"


def program(name: str) -> str:
    """The text of a program of `tests/programs`, for `ForkServer.run`; it can import others of that folder."""
    return (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")


class ForkServer:
    """A helper process and what its children print.

    Args:
        home: the folder of its caches, emptied before each job.
        environment: for the helper, which keeps no setting of Python, of a Hub or of a proxy.
    """

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        self.home = home
        private = ("PYTHON", "HF_", "HUGGING", "TRANSFORMERS_")
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(private) and not name.lower().endswith("_proxy")
        }
        more = {"HF_HOME": str(home / "hf"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        home.mkdir(parents=True, exist_ok=True)
        self._start = functools.partial(
            subprocess.Popen,
            [sys.executable, "-I", "-c", program("fork_helper"), PROGRAMS, fresh.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**kept, **more, **environment},
            cwd=home.parent,
            start_new_session=True,
        )
        self._helper = self._start()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._helper.pid, signal.SIGKILL)
        self._helper.communicate()

    def run(
        self, code: str, *arguments: object, folder: Path, elsewhere: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a process of its own; it finds `arguments` in `sys.argv[1:]`, and `sys` imported.

        Args:
            code: the program.
            arguments: written as text.
            folder: where it runs.
            elsewhere: this package cannot be imported.
            environment: set for this program; what the libraries read when they are imported is set for the helper.
        """
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()
        said = [self.home.with_suffix(f".{name}") for name in ("stdout", "stderr")]
        job = {
            "code": code,
            "arguments": list(map(str, arguments)),
            "folder": str(folder),
            "elsewhere": elsewhere,
            "environment": environment,
            "stdout": str(said[0]),
            "stderr": str(said[1]),
        }
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        print(json.dumps(job), file=self._helper.stdin, flush=True)
        try:
            status = int(self._helper.stdout.readline())
        except BaseException:  # a time limit; the answer that comes later would be taken for the next job's
            self.close()
            self._helper = self._start()
            raise
        return subprocess.CompletedProcess(code, status, *(path.read_text(encoding="utf-8") for path in said))

    def said(self, code: str, *arguments: object, folder: Path, **how: object) -> str:
        """The last line that a program prints; see `run`.

        Raises:
            AssertionError: the program failed.
        """
        done = self.run(code, *arguments, folder=folder, **how)
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip().splitlines()[-1]
