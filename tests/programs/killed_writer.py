"""Replace a folder and be killed at every call on the way, with the exchange call and without; what each kill left."""

import json
import os
import signal

import torch
from kill_points import base, killed_at, know, model, source, target

from blockformer.files import atomic
from blockformer.files.atomic import atomic_folder
from blockformer.files.safetensors_io import SafetensorsWriter
from blockformer.files.writer import ShardWriter


def build(folder, value):
    (folder / "config.json").write_text(json.dumps({"value": value}))
    tensors = {name: torch.full((value, 8), float(value)) for name in "abcd"}
    with ShardWriter(folder, [(name, t.dtype, t.shape) for name, t in tensors.items()], value * 64) as shards:
        for name, tensor in tensors.items():
            shards.write_parts(name, [tensor])


def replace(force=True):
    with atomic_folder(target, force=force, sources=[source]) as folder:
        build(folder, 7)


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
    run = killed_at(limit, child, exchange, existing)
    aside = [model(path) for path in base.glob(".x.*.old")]
    replace()  # the next run does not mind what the dead one left
    assert model(target) == "new"
    return {**run, "aside": aside}


for name, value in (("old", 3), ("new", 7), ("source", 5)):
    (base / name).mkdir()
    build(base / name, value)
    atomic.mark(base / name)
know()
runs = {}
for name, exchange, existing in (("replace", True, True), ("fresh", True, False), ("fallback", False, True)):
    runs[name] = [kill_at(1, exchange, existing)]
    while runs[name][-1]["status"]:
        runs[name].append(kill_at(len(runs[name]) + 1, exchange, existing))
print(json.dumps(runs))
