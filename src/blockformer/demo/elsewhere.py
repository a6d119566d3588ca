"""Run code in a fresh process that cannot import this package, as those who load a published repo do."""

import json
import os
import subprocess
import sys
import tempfile
from inspect import getsource

from .fresh import Refuse

PREAMBLE = f"import sys\n\n{getsource(Refuse)}\nsys.meta_path.insert(0, Refuse('blockformer'))\n"


class ReloadError(RuntimeError):
    """A repo does not behave elsewhere as it does here."""


def run_elsewhere(code: str, *arguments: object):
    """What `code` prints last, as JSON.

    Args:
        code: a program; it finds `arguments` in `sys.argv[1:]`.
        arguments: written as text.

    Raises:
        ReloadError: the process failed; the message has its last lines.
    """
    command = [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as scratch:  # modules of an earlier repo in the user's cache must not help
        environment = {**os.environ, "HF_MODULES_CACHE": scratch, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, check=False
        )
    if done.returncode:
        raise ReloadError(f"the repo failed in a fresh process:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
