"""Convert and be killed, at each `step`-th call and at those around the rename; then several converters at once."""

import json
import os
import signal
import sys
from pathlib import Path

import transformers
from kill_points import base, killed_at, know, known, model, prepare, source, state, target

from blockformer.conversion import ConversionError, convert
from blockformer.files import atomic
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import CheckpointError
from blockformer.files.safetensors_io import SafetensorsWriter

step = int(sys.argv[2])
os.fsync = lambda descriptor: None  # a kill is no power cut; that everything is synced has a test of its own
sizes = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
config = transformers.Qwen3Config(**sizes, bos_token_id=1, eos_token_id=2)
transformers.Qwen3ForCausalLM(config).save_pretrained(source)
(source / "tokenizer_config.json").write_text('{"auto_map": {}, "model_max_length": 8}')


def replace(force):
    convert(source, target, verify=False, force=force, max_shard_size=2000)


def child(limit, force, report):
    count = 0

    def point(name, half=lambda: None):
        nonlocal count
        count += 1
        if count == limit:
            half()
            os.write(report, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    put, text = SafetensorsWriter._put, Path.write_text

    def counted_put(self, data):
        point("write", lambda: put(self, data[: len(data) // 2]))
        put(self, data)

    def counted_text(self, data, *args, **kwargs):
        point("text", lambda: text(self, data[: len(data) // 2], *args, **kwargs))
        return text(self, data, *args, **kwargs)

    SafetensorsWriter._put, Path.write_text = counted_put, counted_text
    rename, sync = atomic._renameat2, os.fsync

    def counted_rename(*args):
        point("rename")
        return rename(*args)

    def counted_sync(descriptor):
        point("sync")
        return sync(descriptor)

    atomic._renameat2, os.fsync = counted_rename, counted_sync
    events = ("os.rename", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "shutil.copyfile")

    def hook(event, args):
        if event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(base) in str(args[0]):
            point("open")
        elif event in events:
            point(event)

    sys.addaudithook(hook)
    replace(force)


def kill_at(limit, force):
    run = killed_at(limit, child, force, force)
    if run["found"] != "none":
        with Checkpoint(target) as checkpoint:  # what a reader would do
            for name in checkpoint.tensors:
                checkpoint.read(name)
    others = [path.name for path in base.iterdir() if path.name not in (*known, "x")]
    assert all(name.startswith(".x.") and name.endswith(".tmp") for name in others), others
    return {"point": limit, **run, "left": len(others)}


def kills(force):
    # Forward in steps to the run that comes through, and each point around the change.
    found, at = {}, 1
    while not found or all(run["status"] for run in found.values()):
        found[at] = kill_at(at, force)
        at += step
    if step > 1:
        last = max((at for at, run in found.items() if run["found"] != "new"), default=1)
        for at in range(last, min(last + step + 1, max(found))):
            found.setdefault(at, kill_at(at, force))
    replace(True)  # the next run does not mind what the dead ones left
    assert model(target) == "new", {*state(target)} ^ {*known["new"]}
    return [found[at] for at in sorted(found)]


def together(force):
    # Three converters on one target, and a reader all the while.
    prepare(force)
    go, seen = base / "go", set()
    for dtype in ("float32", "bfloat16", "float16"):
        pid = os.fork()
        if pid == 0:
            while not go.exists():
                pass
            try:
                for _ in range(4 if force else 1):
                    convert(source, target, verify=False, force=force, dtype=dtype)
                os._exit(0)
            except ConversionError:
                os._exit(1)
            finally:
                os._exit(2)
    go.touch()
    codes = []
    while len(codes) < 3:
        try:
            with Checkpoint(target) as checkpoint:
                kinds = {str(checkpoint.read(name).dtype)[6:] for name in checkpoint.tensors}
                assert kinds == {checkpoint.config["dtype"]}, (kinds, checkpoint.config["dtype"])
            seen |= kinds
        except CheckpointError as error:  # it was replaced meanwhile, or is not there yet; never a mix
            faults = ("while it was read", "cannot be opened", "missing", "leads nowhere", "not a folder", "no weights")
            assert any(words in str(error) for words in faults), error  # noqa: PT017
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes.append(os.waitstatus_to_exitcode(status))
    go.unlink()
    with Checkpoint(target) as checkpoint:
        seen |= {str(checkpoint.read(name).dtype)[6:] for name in checkpoint.tensors}
    left = sorted({path.name for path in base.iterdir()} - {*known})
    return {"codes": sorted(codes), "seen": sorted(seen), "left": left}


convert(source, base / "old", verify=False, dtype="bfloat16")
replace(False)
os.rename(target, base / "new")
know()
print(
    json.dumps(
        {"replace": kills(True), "fresh": kills(False), "together": [together(True), together(False)]},
    )
)
