"""A folder that is replaced by processes which are killed on the way, for `killed_writer` and `killed_converter`.

Their child counts its calls and kills itself before call number N (writes: after half of the bytes), for N = 1, 2, ...
until one comes through.
"""

import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from blockformer.files import atomic

torch.set_num_threads(1)
base = Path(sys.argv[1])
target, source = base / "x", base / "source"
known = {}
"""What is in each folder that stays: the old target, the new one, the source."""


def state(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != atomic.MARK)  # it has times
    return [(str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).digest()) for path in files]


def model(folder):
    return next((name for name in ("old", "new") if state(folder) == known[name]), "MIXED")


def know():
    # What is in `base` by now stays.
    known.update({name: state(base / name) for name in ("old", "new", "source")})


def prepare(existing):
    # Nothing but what is known and, if there is to be one already, an old target.
    for path in base.iterdir():
        if path.name not in known:
            shutil.rmtree(path)
    if existing:
        shutil.copytree(base / "old", target)


def killed_at(limit, child, way, existing):
    # What there is after `child(limit, way, report)`, which ends its process before its call number `limit`.
    prepare(existing)
    receive, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(limit, way, report)
        os._exit(0)
    os.close(report)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    with os.fdopen(receive) as pipe:
        call = pipe.read()
    assert state(source) == known["source"]
    return {"call": call, "found": model(target) if target.is_dir() else "none", "status": status}
