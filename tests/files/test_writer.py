"""Sharded writing, and folders that appear whole or not at all."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import contents, make_sharded, make_single, same_bits
from fork_server import ForkServer, program
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from blockformer.files import atomic, safetensors_io, writer
from blockformer.files.atomic import MARK, atomic_folder, mark, write_text
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import CheckpointError, ConversionError
from blockformer.files.safetensors_io import SafetensorsWriter
from blockformer.files.sizes import parse_size
from blockformer.files.writer import ShardWriter


def write_all(folder: Path, tensors: dict[str, torch.Tensor], max_shard_size: int | str = "5GB") -> list[str]:
    planned = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    with ShardWriter(folder, planned, max_shard_size) as shards:
        for name, tensor in tensors.items():
            shards.write_parts(name, [tensor])
    return shards.files


def make_new(folder: Path) -> None:
    """Fill a folder with a model other than `make_single`'s and `make_sharded`'s."""
    (folder / "config.json").write_text('{"model_type": "new"}')
    write_all(folder, {"new": torch.arange(6.0)})


# --- sizes and shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("1B", 1), (" 1kb ", 1000), ("200 mb", 2 * 10**8), ("1.5GiB", 3 << 29), ("2TB", 2 * 10**12)],
)
def test_parse_size(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", 0, -5, "0", "0.5B", "5XB", "1e9", "nan", "5GB\n5", "\u0665GB", True, None, 1.5e300]
)
def test_bad_size(text: Any) -> None:
    with pytest.raises(ConversionError, match=r"max_shard_size.*needs a size such as 5GB"):
        parse_size(text)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=12), limit=st.integers(1, 120))
def test_shards_are_filled_in_order(tmp_path: Path, sizes: list[int], limit: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    tensors = {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}
    files = write_all(folder, tensors, limit)
    (folder / "config.json").write_text("{}")
    with Checkpoint(folder) as checkpoint:
        assert list(checkpoint.tensors) == list(tensors)  # shard by shard in planned order
        assert all(same_bits(checkpoint.read(name), tensors[name]) for name in tensors)
        assert [path.name for path in dict.fromkeys(info.file for info in checkpoint.tensors.values())] == files
    loads = [[tensor.nbytes for tensor in load_file(folder / file).values()] for file in files]
    assert all(sum(load) <= limit or len(load) == 1 for load in loads)
    index = folder / "model.safetensors.index.json"
    if len(files) == 1:
        assert files == ["model.safetensors"]
        assert not index.exists()
    else:
        assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
        content = json.loads(index.read_text())
        assert content["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        assert {
            name: name in load_file(folder / file) for name, file in content["weight_map"].items()
        } == dict.fromkeys(tensors, True)


def test_a_shard_is_begun_only_when_it_must(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(size) for name, size in {"a": 2, "b": 3, "c": 1, "d": 9, "e": 1}.items()}
    write_all(tmp_path, tensors, 20)
    assert [sorted(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))] == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e"],
    ]


def test_what_is_written_must_be_what_was_planned(tmp_path: Path) -> None:
    planned = [("a", torch.float32, (2,)), ("b", torch.float32, (2,))]
    with (
        pytest.raises(ConversionError, match="'b' was written where 'a' was planned"),
        ShardWriter(tmp_path, planned) as shards,
    ):
        shards.write_parts("b", [torch.zeros(2)])
    with pytest.raises(ConversionError, match="not the planned tensor"), ShardWriter(tmp_path, planned) as shards:
        shards.write_parts("a", [torch.zeros(2).half()])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="not written, 'b'"), ShardWriter(tmp_path, planned) as shards:
        shards.write_parts("a", [torch.zeros(2)])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="'c' was written where 'None'"), ShardWriter(tmp_path, planned) as shards:  # noqa: PT012
        for name in "abc":
            shards.write_parts(name, [torch.zeros(2)])
    with pytest.raises(ConversionError, match="twice"):
        ShardWriter(tmp_path, planned * 2)
    with pytest.raises(ConversionError, match="no tensors"):
        ShardWriter(tmp_path, [])


def test_finished_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    write_all(tmp_path, {"a": torch.zeros(4), "b": torch.zeros(4)}, 16)
    assert len(list(tmp_path.iterdir())) == 3
    assert {path.stat().st_ino for path in tmp_path.iterdir()} == set(synced)


def test_parts_must_be_the_planned_tensor(tmp_path: Path) -> None:
    planned = [("a", torch.float32, (2, 3)), ("b", torch.float64, (2,))]
    b = torch.zeros(2).double()
    for number, parts in enumerate(([torch.zeros(5)], [torch.zeros(4), torch.zeros(3)], [torch.zeros(6).int()], [])):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(ConversionError, match="the parts of 'a' are not the planned tensor"):
            with ShardWriter(tmp_path / str(number), planned) as shards:
                shards.write_parts("a", iter(parts))
    with ShardWriter(tmp_path, planned) as shards:
        shards.write_parts("a", iter([torch.arange(2.0), torch.arange(2.0, 6.0)]))
        shards.write_parts("b", iter([b[:1], b[1:]]))
    assert same_bits(load_file(tmp_path / "model.safetensors")["a"], torch.arange(6.0).reshape(2, 3))


def test_the_disk_begins_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(safetensors_io, "WINDOW", 1000)
    monkeypatch.setattr(safetensors_io, "start_writing", lambda descriptor: told.append(os.fstat(descriptor).st_size))
    write_all(tmp_path, {name: torch.zeros(600) for name in "abc"})
    assert len(told) >= 6
    assert told == sorted(told)
    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda _: object())  # a system that has no such call
    atomic.start_writing(0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads its memory from /proc")
def test_only_one_tensor_is_in_memory(tmp_path: Path, processes: ForkServer) -> None:
    size, folders = 8 << 20, [tmp_path / name for name in ("small", "small target", "large", "large target")]
    for source, rows in ((folders[0], 1), (folders[2], size // 4096)):
        make_single(source, {f"t{i}": torch.full((rows, 1024), float(i)) for i in range(16)})
    for target in folders[1::2]:
        target.mkdir()
    grown = int(processes.said(program("memory_of_writing"), *folders, folder=tmp_path, elsewhere=False))
    # The tensor, its transposed copy, as much again that the allocator still holds, a constant; all take 128 MiB.
    assert grown < 4 * size + (24 << 20)


# --- the folder -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["exchange", "fallback"])
def any_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the system's exchange, and where it has none."""
    if request.param == "fallback":
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    return request.param


def test_new_folder(tmp_path: Path, any_rename: str) -> None:
    with atomic_folder(tmp_path / "some" / "where" / "x") as folder:
        make_new(folder)
        assert not (tmp_path / "some" / "where" / "x").exists()
        assert folder.parent == tmp_path / "some" / "where"
    assert (tmp_path / "some" / "where" / "x" / "model.safetensors").exists()
    assert os.listdir(tmp_path / "some" / "where") == ["x"]


def test_a_text_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "x", "new\n\udc80")
    assert (tmp_path / "x").read_bytes() == b"old\n"
    write_text(tmp_path / "x", "new\n")
    assert (tmp_path / "x").read_bytes() == b"new\n"
    assert os.listdir(tmp_path) == ["x"]


def test_existing_folder_is_refused_without_force(tmp_path: Path) -> None:
    make_single(tmp_path / "x")
    before = contents(tmp_path)
    with pytest.raises(ConversionError, match=r"already exists.*force=True"), atomic_folder(tmp_path / "x"):
        pytest.fail("the block must not run")
    assert contents(tmp_path) == before


def test_existing_folder_is_replaced_whole_with_force(tmp_path: Path, any_rename: str) -> None:
    make_sharded(tmp_path / "x")
    mark(tmp_path / "x")
    with atomic_folder(tmp_path / "x", force=True) as folder:
        make_new(folder)
    assert sorted(os.listdir(tmp_path / "x")) == [MARK, "config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["x"]


def test_force_replaces_an_empty_folder(tmp_path: Path, any_rename: str) -> None:
    (tmp_path / "x").mkdir()
    with atomic_folder(tmp_path / "x", force=True) as folder:
        (folder / "new").touch()
    assert sorted(os.listdir(tmp_path / "x")) == [MARK, "new"]
    assert os.listdir(tmp_path) == ["x"]


def _by_hand(folder: Path) -> None:
    (folder / MARK).unlink()


def _with_git(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main")


def _with_notes(folder: Path) -> None:
    (folder / "thesis.tex").write_text("years")


def _edited(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "tiny", "mine": 1}')


def _rewritten_with_as_many_bytes(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


def _with_a_link(folder: Path) -> None:
    (folder / "data").symlink_to(folder.parent / "elsewhere", target_is_directory=True)


def _with_an_empty_folder(folder: Path) -> None:
    (folder / "figures").mkdir()


def _with_a_bad_mark(folder: Path) -> None:
    (folder / MARK).write_text("[" * 100_000)


CHANGES = {
    _by_hand: "was not made by Blockformer",
    _with_git: "'.git/HEAD', which Blockformer did not write",
    _with_notes: "'thesis.tex', which Blockformer did not write",
    _edited: "'config.json' was changed",
    _rewritten_with_as_many_bytes: "'model.safetensors' was changed",
    _with_an_empty_folder: "'figures/', which Blockformer did not write",
    _with_a_link: "'data', which Blockformer did not write",
    _with_a_bad_mark: "was not made by Blockformer",
}


@pytest.mark.parametrize("change", CHANGES)
def test_force_spares_what_it_did_not_write(tmp_path: Path, change: Any) -> None:
    with atomic_folder(tmp_path / "x") as folder:
        make_single(folder)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "letter").write_text("dear")
    change(tmp_path / "x")
    before = contents(tmp_path)
    with pytest.raises(ConversionError, match=CHANGES[change]), atomic_folder(tmp_path / "x", force=True):
        pytest.fail("the block must not run")
    with pytest.raises(ConversionError, match=CHANGES[change]):
        atomic.remove_folder(tmp_path / "x")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moment", ["check_target", "_why_kept"])
def test_what_appears_while_a_folder_is_replaced_stays(
    tmp_path: Path, moment: str, any_rename: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that somebody puts there after the last look: the old folder comes back, or stays beside the new one."""
    with atomic_folder(tmp_path / "x") as folder:
        make_single(folder)
    real, calls = getattr(atomic, moment), []

    def look(*arguments: Any) -> Any:
        found = real(*arguments)
        calls.append(arguments)
        if len(calls) == {"check_target": 2, "_why_kept": 3}[moment]:
            place = Path(arguments[0])
            (place / "thesis.tex").write_text("years")
        return found

    monkeypatch.setattr(atomic, moment, look)
    if moment == "check_target":
        with pytest.raises(ConversionError, match=r"thesis.tex"), atomic_folder(tmp_path / "x", force=True) as folder:
            make_new(folder)
        assert contents(tmp_path / "x")["thesis.tex"] == b"years"
        assert os.listdir(tmp_path) == ["x"]
        return
    with pytest.warns(UserWarning, match="they are here"), atomic_folder(tmp_path / "x", force=True) as folder:
        make_new(folder)
    (kept,) = [path for path in tmp_path.iterdir() if path.name != "x"]
    assert os.listdir(kept) == ["thesis.tex"] or sorted(os.listdir(kept)) == [MARK, "thesis.tex"]


@pytest.mark.parametrize("force", [True, False])
def test_target_that_is_a_file_or_a_link(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("mine")
    make_single(tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "broken").symlink_to("nowhere")
    before = contents(tmp_path)
    for name, message in {"file": "a file is there", "link": "a link", "broken": "a link"}.items():
        with pytest.raises(ConversionError, match=message), atomic_folder(tmp_path / name, force=force):
            pass
    with pytest.raises(ConversionError, match="not a folder to write to"), atomic_folder("/", force=force):
        pass
    with pytest.raises(ConversionError, match="not written"), atomic_folder(tmp_path / "file" / "x", force=force):
        pass
    assert contents(tmp_path) == before
    assert (tmp_path / "link").is_symlink()


def test_target_and_source_must_be_apart(tmp_path: Path) -> None:
    source = tmp_path / "models" / "source"
    make_sharded(source)
    (tmp_path / "models" / "config.json").write_text("{}")
    (tmp_path / "alias").symlink_to("models")
    make_single(tmp_path / "linked")
    os.link(source / "model-00001-of-00003.safetensors", tmp_path / "linked" / "part")
    before = contents(tmp_path)
    for target, message in {
        "models/source": "is the source",
        "alias/source": "is the source",
        "models/../models/source": "is the source",
        "models/source/out": "is inside it",
        "alias/source/deep/out": "is inside it",
        "models": "holds the source",
        "linked": "hard-linked",
    }.items():
        with pytest.raises(ConversionError, match=message):
            with atomic_folder(tmp_path / target, force=True, sources=[source]):
                pass
        assert contents(tmp_path) == before
    with atomic_folder(tmp_path / "models" / "beside", sources=[source, tmp_path / "alias" / "source"]) as folder:
        make_new(folder)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder for a user whom permissions bind; root steps down to one."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777)
        shutil.rmtree(folder)


def test_read_only_parent(unprivileged: Path) -> None:
    (unprivileged / "parent").mkdir()
    make_single(unprivileged / "parent" / "x")
    mark(unprivileged / "parent" / "x")
    (unprivileged / "parent").chmod(0o555)
    before = contents(unprivileged)
    for name, force in (("x", True), ("y", False), ("deep/y", False)):
        with pytest.raises(ConversionError, match=r"not written, nothing was changed.*denied"):
            with atomic_folder(unprivileged / "parent" / name, force=force):
                pytest.fail("the block must not run")
    assert contents(unprivileged) == before


def test_read_only_target(tmp_path: Path) -> None:
    make_single(tmp_path / "x")
    mark(tmp_path / "x")
    (tmp_path / "x").chmod(0o555)
    with pytest.raises(ConversionError, match="read-only"), atomic_folder(tmp_path / "x", force=True):
        pytest.fail("the block must not run")
    (tmp_path / "x").chmod(0o755)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), RuntimeError("boom"), CheckpointError("boom")])
@pytest.mark.parametrize("existing", [True, False])
def test_an_error_leaves_nothing_behind(tmp_path: Path, error: BaseException, existing: bool) -> None:
    target = tmp_path / "deep" / "x"
    if existing:
        make_single(target)
        mark(target)
    before = sorted(tmp_path.rglob("*")), contents(tmp_path)
    with pytest.raises(type(error)) as caught, atomic_folder(target, force=True) as folder:  # noqa: PT012
        make_new(folder)
        raise error
    assert caught.value is error
    assert (sorted(tmp_path.rglob("*")), contents(tmp_path)) == before


@pytest.mark.parametrize("call", ["_sync", "_seal", "rename"])
def test_an_error_while_publishing_leaves_the_old_target(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_single(tmp_path / "x")
    mark(tmp_path / "x")
    before = contents(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if call == "rename":  # the second rename of the fallback fails: the old folder goes back to its place
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
        real = os.rename
        monkeypatch.setattr(os, "rename", lambda a, b: fail() if str(a).endswith(".tmp") else real(a, b))
    else:
        monkeypatch.setattr(atomic, call, fail)
    with (
        pytest.raises(ConversionError, match="nothing was changed"),
        atomic_folder(tmp_path / "x", force=True) as folder,
    ):
        make_new(folder)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["x"]


def test_parents_that_other_runs_make_and_remove_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.mkdir, []

    def mkdir(path: Any, *arguments: Any) -> None:
        calls.append(Path(path).name)
        if calls.count("deep") == 1 == len(calls):  # another run makes it first
            real(path)
        if len(calls) == 3:  # that run has failed, and removes what it had made
            os.rmdir(tmp_path / "deep" / "er")
            os.rmdir(tmp_path / "deep")
        real(path, *arguments)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with atomic_folder(tmp_path / "deep" / "er" / "x") as folder:
        make_new(folder)
    assert calls[:2] == ["deep", "er"] == calls[3:5]
    assert os.listdir(tmp_path / "deep" / "er") == ["x"]


def test_many_runs_share_a_parent(tmp_path: Path) -> None:
    def run(number: int) -> bool:
        with suppress(RuntimeError), atomic_folder(tmp_path / f"deep{number // 4}" / "er" / f"{number}") as folder:
            (folder / "new").touch()
            if number % 2:
                raise RuntimeError
        return number % 2 == 1 or (tmp_path / f"deep{number // 4}" / "er" / f"{number}" / "new").exists()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(120)))


def test_stale_temporary_folders_are_ignored(tmp_path: Path) -> None:
    stale = tmp_path / ".x.0123abcd.tmp"
    make_sharded(stale)
    before = contents(stale)
    with atomic_folder(tmp_path / "x") as folder:
        assert folder != stale
        make_new(folder)
    assert contents(stale) == before
    assert sorted(os.listdir(tmp_path / "x")) == [MARK, "config.json", "model.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "x") as folder:
            write_all(folder, {"a": torch.zeros(4), "b": torch.zeros(4)}, 16)
            (folder / "sub").mkdir(mode=0o700)
            (folder / "sub" / "private").touch(mode=0o600)
            os.close(os.open(folder / "runnable", os.O_CREAT | os.O_WRONLY, 0o777))
    finally:
        os.umask(before)
    for path in [tmp_path / "x", *(tmp_path / "x").rglob("*")]:
        want = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == want, path


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of open files from /proc")
def test_everything_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, renamed = [], []
    real_sync, real_rename = os.fsync, atomic._renameat2

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def rename(source: Path, target: Path, flag: int) -> bool:
        renamed.append((source, list(synced)))
        return real_rename(source, target, flag)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(atomic, "_renameat2", rename)
    with atomic_folder(tmp_path / "x") as folder:
        write_all(folder, {"a": torch.zeros(4), "b": torch.zeros(4)}, 16)
        (folder / "sub").mkdir()
        (folder / "sub" / "file").touch()
    ((temporary, before),) = renamed
    assert temporary == folder
    made = {str(temporary / path.relative_to(tmp_path / "x")) for path in (tmp_path / "x").rglob("*")}
    assert made | {str(temporary)} <= set(before)
    assert synced[-1] == str(tmp_path)


# --- a full disk ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(5))
def test_disk_full_at_any_write(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_single(tmp_path / "x")
    mark(tmp_path / "x")
    before = contents(tmp_path)
    real, count = SafetensorsWriter._put, iter(range(100))

    def put(self: SafetensorsWriter, data: Any) -> None:
        if next(count) == at:
            real(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, data)

    monkeypatch.setattr(SafetensorsWriter, "_put", put)
    with pytest.raises(ConversionError, match=r"No space left.*free some space") as caught:
        with atomic_folder(tmp_path / "x", force=True) as folder:
            write_all(folder, {name: torch.zeros(100) for name in "abc"}, 800)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["x"]


def test_disk_too_small_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="bytes are needed"):
        with atomic_folder(tmp_path / "x") as folder:
            ShardWriter(folder, [("a", torch.float32, (1 << 50,))])
    assert not os.listdir(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_single(small_disk / "x")
    mark(small_disk / "x")
    before = contents(small_disk)
    tensors = {str(i): torch.zeros(40_000) for i in range(10)}
    with pytest.raises(ConversionError, match="bytes are needed"):
        with atomic_folder(small_disk / "x", force=True) as folder:
            write_all(folder, tensors)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 0, 1 << 50))  # type: ignore[attr-defined]
    for size in ("5GB", 200_000):
        with pytest.raises(ConversionError, match="free some space"):
            with atomic_folder(small_disk / "x", force=True) as folder:
                write_all(folder, tensors, size)
        assert contents(small_disk) == before
        assert os.listdir(small_disk) == ["x"]


# --- more than one at a time ----------------------------------------------------------------------------------------


def test_target_that_appears_meanwhile_is_not_touched(tmp_path: Path, any_rename: str) -> None:
    with pytest.raises(ConversionError, match="already exists"), atomic_folder(tmp_path / "x") as folder:  # noqa: PT012
        make_new(folder)
        make_sharded(tmp_path / "x")
        before = contents(tmp_path / "x")
    assert contents(tmp_path / "x") == before
    assert os.listdir(tmp_path) == ["x"]


def test_empty_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="already exists"), atomic_folder(tmp_path / "x") as folder:  # noqa: PT012
        make_new(folder)
        (tmp_path / "x").mkdir()
    assert os.listdir(tmp_path) == ["x"]
    assert not os.listdir(tmp_path / "x")


def version(folder: Path, number: int) -> None:
    """A model that says everywhere which version it is; versions differ in size."""
    (folder / "config.json").write_text(json.dumps({"version": number}))
    write_all(folder, {name: torch.full((number,), float(number)) for name in "abc"}, 4 * number)


def seen_version(folder: Path) -> int:
    """The version in a folder, checked to be the same in all its parts."""
    with Checkpoint(folder) as checkpoint:
        number = checkpoint.config["version"]
        assert list(checkpoint.tensors) == ["a", "b", "c"]
        for name in "abc":
            assert torch.equal(checkpoint.read(name), torch.full((number,), float(number)))
    return number


@pytest.mark.parametrize("force", [True, False])
def test_of_several_writers_one_wins_whole(tmp_path: Path, force: bool, any_rename: str) -> None:
    ready, losers = threading.Barrier(4), []

    def convert(number: int) -> None:
        try:
            with atomic_folder(tmp_path / "x", force=force) as folder:
                version(folder, number)
                ready.wait()
        except ConversionError:
            losers.append(number)

    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(convert, range(1, 5)))  # raises what a thread has raised
        winner = seen_version(tmp_path / "x")
        assert winner not in losers
        if any_rename == "exchange":
            assert len(losers) == (0 if force else 3)
            assert os.listdir(tmp_path) == ["x"]
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        losers.clear()


def test_a_reader_sees_only_whole_models(tmp_path: Path) -> None:
    target, stop, failures = tmp_path / "x", threading.Event(), []
    seen: list[int] = []
    written = [2]

    def replace() -> None:
        try:
            for number in range(2, 2000):
                with atomic_folder(target, force=True) as folder:
                    version(folder, 1 + number % 7)
                written.append(1 + number % 7)
                if number > 80 and len(seen) > 10:  # on a busy machine the reader has its turn seldom
                    break
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()

    with atomic_folder(target) as folder:
        version(folder, 2)
    thread = threading.Thread(target=replace)
    thread.start()
    refusals = []
    while not stop.is_set():
        assert target.is_dir()
        try:
            seen.append(seen_version(target))
        except CheckpointError as error:  # it says that the folder was replaced while being read; never a mix
            refusals.append(str(error))
    thread.join()
    assert not failures
    known = ("while it was read", "cannot be opened", "missing", "leads nowhere")
    assert all(any(part in refusal for part in known) for refusal in refusals), refusals
    assert len(seen) > 10
    assert len(set(seen)) > 1
    assert seen_version(target) == written[-1]
