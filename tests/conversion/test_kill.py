"""SIGKILL at every write, sync and rename: the target is the old model or the new one, whole.

First of the writers alone, then of `convert` itself. A process forks a child for each
kill point. A child counts its calls and kills itself before call number N (writes: after half of the bytes), for
N = 1, 2, ... until a child comes through.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

COMMON = r"""
import hashlib, json, os, shutil, signal, sys
from pathlib import Path
import torch
from blockformer.conversion.files import atomic
from blockformer.conversion.files.safetensors_io import SafetensorsWriter

base = Path(sys.argv[1])
torch.set_num_threads(1)
target, source = base / "x", base / "source"

def state(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != atomic.MARK)  # it has times
    return [(str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).digest()) for path in files]

def model(folder):
    return next((name for name in ("old", "new") if state(folder) == known[name]), "MIXED")

def prepare(existing):
    # Nothing but what is known and, if there is to be one already, an old target.
    for path in base.iterdir():
        if path.name not in known:
            shutil.rmtree(path)
    if existing:
        shutil.copytree(base / "old", target)

def killed_at(limit, existing, way):
    # What there is after `child(limit, way, report)`, a script's own, which ends itself before its call number `limit`.
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
"""

SCRIPT = r"""
from blockformer.conversion.files.atomic import atomic_folder
from blockformer.conversion.files.writer import ShardWriter

def build(folder, value):
    (folder / "config.json").write_text(json.dumps({"value": value}))
    tensors = {name: torch.full((value, 8), float(value)) for name in "abcd"}
    with ShardWriter(folder, [(name, t.dtype, t.shape) for name, t in tensors.items()], value * 64) as shards:
        for name, tensor in tensors.items():
            shards.write(name, tensor)

def replace(force=True):
    with atomic_folder(target, force=force, sources=[source]) as folder:
        build(folder, 7)

for name, value in (("old", 3), ("new", 7), ("source", 5)):
    (base / name).mkdir()
    build(base / name, value)
    atomic.mark(base / name)
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
    run = killed_at(limit, existing, exchange)
    aside = [model(path) for path in base.glob(".x.*.old")]
    replace()  # the next run does not mind what the dead one left
    assert model(target) == "new"
    return {**run, "aside": aside}

runs = {}
for name, exchange, existing in (("replace", True, True), ("fresh", True, False), ("fallback", False, True)):
    runs[name] = [kill_at(1, exchange, existing)]
    while runs[name][-1]["status"]:
        runs[name].append(kill_at(len(runs[name]) + 1, exchange, existing))
print(json.dumps(runs))
"""


@pytest.fixture(scope="module")
def runs(processes: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the target was after each kill, for each way of replacing; the last entry is the run that came through."""
    folder = tmp_path_factory.mktemp("kill")
    return json.loads(processes.said(COMMON + SCRIPT, folder, folder=folder, elsewhere=False))


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


CONVERT = r"""
import transformers
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.files.checkpoint import Checkpoint
from blockformer.conversion.errors import CheckpointError

step = int(sys.argv[2])
os.fsync = lambda descriptor: None  # a kill is no power cut; that everything is synced has a test of its own
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
config = transformers.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8, bos_token_id=1, eos_token_id=2)
transformers.Qwen3ForCausalLM(config).save_pretrained(source)
(source / "tokenizer_config.json").write_text('{"auto_map": {}, "model_max_length": 8}')

def replace(force):
    convert(source, target, verify=False, force=force, max_shard_size=2000)

convert(source, base / "old", verify=False, dtype="bfloat16")
replace(False)
os.rename(target, base / "new")
known = {name: state(base / name) for name in ("old", "new", "source")}

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
    run = killed_at(limit, force, force)
    if run["found"] != "none":
        with Checkpoint(target) as checkpoint:  # what a reader would do
            [checkpoint.read(name) for name in checkpoint.tensors]
    others = [path.name for path in base.iterdir() if path.name not in (*known, "x")]
    assert all(name.startswith(".x.") and name.endswith(".tmp") for name in others), others
    return {"point": limit, **run, "left": len(others)}

runs = {}
for name, force in (("replace", True), ("fresh", False)):
    found, at = {}, 1
    while not found or all(run["status"] for run in found.values()):  # forward in steps to the run that comes through
        found[at] = kill_at(at, force)
        at += step
    if step > 1:  # and each point around the change
        last = max((at for at, run in found.items() if run["found"] != "new"), default=1)
        for at in range(last, min(last + step + 1, max(found))):
            found.setdefault(at, kill_at(at, force))
    runs[name] = [found[at] for at in sorted(found)]
    replace(True)  # the next run does not mind what the dead ones left
    assert model(target) == "new", {*state(target)} ^ {*known["new"]}

def together(force):
    # Three converters on one target, and a reader all the while.
    prepare(force)
    go, children, seen = base / "go", [], set()
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
        children.append(pid)
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
            assert any(words in str(error) for words in faults), error
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes.append(os.waitstatus_to_exitcode(status))
    go.unlink()
    with Checkpoint(target) as checkpoint:
        seen |= {str(checkpoint.read(name).dtype)[6:] for name in checkpoint.tensors}
    left = sorted({path.name for path in base.iterdir()} - {*known})
    return {"codes": sorted(codes), "seen": sorted(seen), "left": left}

runs["together"] = [together(True), together(False)]
print(json.dumps(runs))
"""


def converters(processes: ForkServer, folder: Path, step: int) -> dict[str, list[dict[str, Any]]]:
    """What the target was after each kill of `convert`, at every `step`-th point and at each around the rename."""
    return json.loads(processes.said(COMMON + CONVERT, folder, step, folder=folder, elsewhere=False))


def check_converters(runs: dict[str, list[dict[str, Any]]]) -> None:
    for name, before in (("replace", "old"), ("fresh", "none")):
        *killed, last = runs[name]
        assert (last["found"], last["status"], last["left"]) == ("new", 0, 0)
        found = [kill["found"] for kill in killed]
        changed = found.index("new") if "new" in found else len(found)
        assert found == [before] * changed + ["new"] * (len(found) - changed)
        assert killed[changed - 1]["call"] == "rename"  # the step right before the change is the one rename
        assert {"write", "sync", "os.chmod", "rename"} <= {kill["call"] for kill in killed}


@pytest.fixture(scope="module")
def some_points(processes: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return converters(processes, tmp_path_factory.mktemp("convert"), 13)


def test_a_converter_killed_at_some_points(some_points: dict[str, list[dict[str, Any]]]) -> None:
    check_converters(some_points)


def test_three_converters_on_one_target_and_a_reader(some_points: dict[str, list[dict[str, Any]]]) -> None:
    replaced, fresh = some_points["together"]
    assert replaced["codes"] == [0, 0, 0]  # each replaced it in its turn, whole
    assert fresh["codes"] == [0, 1, 1]  # one made it, the others were refused
    assert len(replaced["seen"]) > 1
    assert len(fresh["seen"]) == 1  # what was there once stayed
    assert replaced["left"] == fresh["left"] == ["x"]


@pytest.mark.exhaustive
def test_a_converter_killed_at_every_point(processes: ForkServer, tmp_path: Path) -> None:
    runs = converters(processes, tmp_path, 1)
    check_converters(runs)
    points = [len(killed) - 1 for name, killed in runs.items() if name != "together"]
    assert min(points) > 100
    assert {"text", "open", "shutil.copyfile", "os.mkdir"} <= {kill["call"] for kill in runs["replace"]}
    print(f"\n{points} points")
