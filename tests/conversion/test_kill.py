"""SIGKILL at every write, sync and rename of a replacement: the target is the old model or the new one, whole.

One helper process imports everything once, then forks a child for each kill point. A child counts its calls and kills
itself before call number N (writes: after half of the bytes), for N = 1, 2, ... until a child comes through.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = r"""
import hashlib, json, os, shutil, signal, sys
from pathlib import Path
import torch
from blockformer.conversion import atomic
from blockformer.conversion.safetensors_io import SafetensorsWriter
from blockformer.conversion.writer import ShardWriter, atomic_folder

base = Path(sys.argv[1])
torch.set_num_threads(1)
target, source = base / "x", base / "source"

def build(folder, value):
    (folder / "config.json").write_text(json.dumps({"value": value}))
    tensors = {name: torch.full((value, 8), float(value)) for name in "abcd"}
    with ShardWriter(folder, [(name, t.dtype, t.shape) for name, t in tensors.items()], value * 64) as shards:
        for name, tensor in tensors.items():
            shards.write(name, tensor)

def replace(force=True):
    with atomic_folder(target, force=force, sources=[source]) as folder:
        build(folder, 7)

def state(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [(str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).digest()) for path in files]

def model(folder):
    return next((name for name in ("old", "new") if state(folder) == known[name]), "MIXED")

for name, value in (("old", 3), ("new", 7), ("source", 5)):
    (base / name).mkdir()
    build(base / name, value)
known = {name: state(base / name) for name in ("old", "new", "source")}

def child(limit, exchange, report):
    count = 0
    def counted(name, real, half=None):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == limit:
                if half is not None:
                    half(*args)
                os.write(report, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    put = SafetensorsWriter._put
    SafetensorsWriter._put = counted("write", put, lambda self, data: put(self, data[: len(data) // 2]))
    atomic._renameat2 = counted("rename", atomic._renameat2 if exchange else lambda *_: False)
    for name in ("fsync", "rename", "mkdir", "chmod", "unlink", "rmdir"):
        setattr(os, name, counted(name, getattr(os, name)))
    replace()

def kill_at(limit, exchange, existing):
    for path in base.iterdir():
        if path.name not in known:
            shutil.rmtree(path)
    if existing:
        shutil.copytree(base / "old", target)
    receive, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(limit, exchange, report)
        os._exit(0)
    os.close(report)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    with os.fdopen(receive) as pipe:
        call = pipe.read()
    found = model(target) if target.is_dir() else "none"
    aside = [model(path) for path in base.glob(".x.*.old")]
    assert state(source) == known["source"]
    replace()  # the next run does not mind what the dead one left
    assert model(target) == "new"
    return {"call": call, "found": found, "aside": aside, "status": status}

runs = {}
for name, exchange, existing in (("replace", True, True), ("fresh", True, False), ("fallback", False, True)):
    runs[name] = [kill_at(1, exchange, existing)]
    while runs[name][-1]["status"]:
        runs[name].append(kill_at(len(runs[name]) + 1, exchange, existing))
print(json.dumps(runs))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the target was after each kill, for each way of replacing; the last entry is the run that came through."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("kill"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "before"), [("replace", "old"), ("fresh", "none")])
def test_kill_anywhere_leaves_the_old_or_the_new(runs: dict[str, list[dict[str, Any]]], name: str, before: str) -> None:
    *killed, last = runs[name]
    assert (last["found"], last["status"]) == ("new", 0)
    calls = [kill["call"] for kill in killed]
    assert {"write", "fsync", "rename", "mkdir"} <= set(calls)
    assert len(killed) > 20
    renamed = calls.index("rename") + 1
    assert len(killed) > renamed  # some kills came after the rename
    assert [kill["found"] for kill in killed] == [before] * renamed + ["new"] * (len(killed) - renamed)


def test_kill_anywhere_without_the_exchange_call(runs: dict[str, list[dict[str, Any]]]) -> None:
    *killed, last = runs["fallback"]
    assert (last["found"], last["status"]) == ("new", 0)
    for kill in killed:  # between the two renames, and only there, the old model is whole at the name beside
        whole = kill["found"] in ("old", "new") or (kill["found"] == "none" and kill["aside"] == ["old"])
        assert whole, kill
    assert [kill["found"] for kill in killed].count("none") == 1
