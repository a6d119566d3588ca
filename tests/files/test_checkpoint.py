"""Opening checkpoint folders: what is taken, what is refused and why."""

import copy
import json
import os
import pickle
import shutil
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    contents,
    entry,
    make_sharded,
    make_single,
    raw_safetensors,
    read_index,
    same_bits,
    small_tensors,
    write_index,
)
from safetensors.torch import save_file

from blockformer.files import pickled, safetensors_io
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import with_floats
from blockformer.files.errors import CheckpointError
from blockformer.files.finite import nonfinite
from blockformer.files.json_files import read_json


def refused(folder: Path, message: str) -> str:
    """Opening the folder fails with this message and changes nothing in it."""
    before = contents(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder)
    assert contents(folder) == before
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("make", [make_single, make_sharded])
def test_reads_every_tensor_bit_for_bit(tmp_path: Path, make: Callable[[Path], dict[str, torch.Tensor]]) -> None:
    tensors = make(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config == {"model_type": "tiny"}
        assert checkpoint.tensors.keys() == tensors.keys()
        for name in [*tensors, *reversed(tensors)]:
            info = checkpoint.tensors[name]
            assert (info.dtype, info.shape, info.nbytes) == (
                tensors[name].dtype,
                tuple(tensors[name].shape),
                tensors[name].nbytes,
            )
            assert same_bits(checkpoint.read(name), tensors[name])
        checkpoint.read("a.weight").zero_()
        assert same_bits(checkpoint.read("a.weight"), tensors["a.weight"])  # a private copy


# --- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"b": {"a": 1, "a": 1}}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[1]", "JSON object"),
        (b'{"a": 1', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[" * 100_000, "nested"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_bad_config(tmp_path: Path, text: bytes, message: str) -> None:
    make_single(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path / "config.json")
    refused(tmp_path, message)


def test_an_infinity_of_earlier_releases_is_read_as_todays_write_it(tmp_path: Path) -> None:
    make_single(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"limit": [0.0, Infinity], "architectures": null}')
    entries = Checkpoint(tmp_path).config
    assert entries["limit"] == [0.0, {"__float__": "Infinity"}]
    assert with_floats(entries)["limit"] == [0.0, float("inf")]
    assert with_floats({"__float__": "3"}) == {"__float__": "3"}


def test_no_folder_no_config_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint(tmp_path / "nowhere")
    refused(tmp_path, r"no config\.json; the folder is empty")
    (tmp_path / "notes.txt").touch()
    refused(tmp_path, r"there are neither a config\.json nor weights; name the folder of a model")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no weights")


# --- index and shards -----------------------------------------------------------------------------------------------


def test_damaged_shard_is_found_at_opening(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(tmp_path, "00002.*truncated")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = make_sharded(tmp_path)
    save_file({name: tensors[name] for name in ("a.weight", "b.weight")}, tmp_path / "model-00002-of-00003.safetensors")
    refused(tmp_path, "'a.weight' is in .*00001.* and in .*00002")


def test_index_names_the_wrong_shard(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    index = read_index(tmp_path)
    index["a.weight"], index["b.weight"] = index["b.weight"], index["a.weight"]
    write_index(tmp_path, index)
    message = refused(tmp_path, "do not agree")
    assert "'a.weight' is in" in message
    assert "'b.weight' is in" in message


def test_index_and_shards_hold_other_names(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    index = read_index(tmp_path)
    index["ghost"] = index["a.weight"]
    del index["c.weight"]
    index["d.weight"] = "model-00003-of-00003.safetensors"
    write_index(tmp_path, index)
    message = refused(tmp_path, r"(?s)'ghost' is in the index but in no shard.*--mend NEW` writes an index")
    assert "'c.weight' is in a shard but not in the index" in message


def test_missing_shards_are_all_listed(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    message = refused(tmp_path, "missing")
    assert "00001-of" in message
    assert "00003-of" in message
    assert "00002-of" not in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    make_single(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_index(tmp_path, {f"t{i}": f"file{i}.safetensors" for i in range(1000)})
    message = refused(tmp_path, "and 980 more")
    assert message.count("\n") < 30


@pytest.mark.parametrize(
    "name",
    [
        "../x/model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "C:\\model",
        "C:model",
        "a\\b",
        "..",
        ".",
        "",
        "a\0",
        1,
    ],
)
def test_index_names_only_files_of_the_folder(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "x"
    make_sharded(folder)
    make_single(folder / "sub")
    write_index(folder, {**read_index(folder), "a.weight": name})
    refused(folder, "must name files in the same folder")


@pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors"])
def test_index_without_a_map(tmp_path: Path, weight_map: Any) -> None:
    make_sharded(tmp_path)
    write_index(tmp_path, weight_map)
    refused(tmp_path, "weight_map must be an object")


def test_index_with_and_without_metadata(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    Checkpoint(tmp_path)
    write_index(tmp_path, read_index(tmp_path), metadata={"total_size": 1})
    Checkpoint(tmp_path)


def test_single_file_beside_an_index_is_read_with_a_warning(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    save_file({"only": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"both model\.safetensors and .*; model\.safetensors is read"):
        assert list(Checkpoint(tmp_path).tensors) == ["only"]


def test_safetensors_before_bin(tmp_path: Path) -> None:
    tensors = make_single(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    assert Checkpoint(tmp_path).tensors.keys() == tensors.keys()
    assert not Payload.ran


# --- what a name leads to -------------------------------------------------------------------------------------------

FILES = ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_link_that_leaves_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "x"
    make_sharded(folder)
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to("../outside")
    refused(folder, "leaves the folder")


@pytest.mark.parametrize("name", FILES)
def test_link_within_the_folder_is_fine(tmp_path: Path, name: str) -> None:
    make_sharded(tmp_path)
    (tmp_path / name).rename(tmp_path / "elsewhere")
    (tmp_path / name).symlink_to("elsewhere")
    assert len(Checkpoint(tmp_path).tensors) == 3


def hub_cache(tmp_path: Path) -> tuple[Path, Path]:
    """A repo of the Hub cache: snapshots/rev/name -> ../../blobs/hash."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "rev", tmp_path / "models--a--b" / "blobs"
    make_sharded(snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"hash{number}")
        path.symlink_to(f"../../blobs/hash{number}")
    return snapshot, blobs


def test_links_of_the_hub_cache(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    with Checkpoint(snapshot) as checkpoint:
        assert checkpoint.read("a.weight").shape == (3, 4)
    (tmp_path / "link").symlink_to(snapshot)
    Checkpoint(tmp_path / "link")
    (blobs / "hash0").rename(tmp_path / "models--a--b" / "outside")
    (blobs / "hash0").symlink_to("../outside")
    refused(snapshot, "leaves the folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_in_a_circle(tmp_path: Path, name: str) -> None:
    make_single(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)
    refused(tmp_path, "missing|nowhere|cannot be opened")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_no_regular_file(tmp_path: Path, name: str, kind: str) -> None:
    make_single(tmp_path)
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    else:
        try:
            os.mknod(tmp_path / name, 0o20666, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("devices can be made by root only")
    refused(tmp_path, "not a regular file")


# --- the source changes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", *FILES[1:]])
def test_source_that_changes(tmp_path: Path, name: str) -> None:
    make_sharded(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.check_unchanged()
    path = tmp_path / name
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match=f"{name}: changed"):
        checkpoint.check_unchanged()
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name}: vanished"):
        checkpoint.check_unchanged()


def test_folder_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_single(tmp_path / "x")
    tensors = make_sharded(tmp_path / "new")
    (tmp_path / "new" / "config.json").write_text('{"model_type": "new"}')
    real = Checkpoint._weights

    def weights(self: Checkpoint) -> Any:
        if (tmp_path / "new").exists():
            (tmp_path / "x").rename(tmp_path / "old")
            (tmp_path / "new").rename(tmp_path / "x")
        return real(self)

    monkeypatch.setattr(Checkpoint, "_weights", weights)
    with Checkpoint(tmp_path / "x") as checkpoint:  # opened again: all of it is the new one
        assert checkpoint.config == {"model_type": "new"}
        assert all(same_bits(checkpoint.read(name), tensors[name]) for name in tensors)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_no_tensor_is_read_from_a_changed_file(tmp_path: Path, kind: str) -> None:
    make_single(tmp_path)
    path = tmp_path / "model.safetensors"
    if kind == "bin":
        path.unlink()
        path = tmp_path / "pytorch_model.bin"
        torch.save(small_tensors(), path)
    with Checkpoint(tmp_path) as checkpoint:
        shutil.copy(path, tmp_path / "other")
        os.replace(tmp_path / "other", path)
        with pytest.raises(CheckpointError, match="changed"):
            checkpoint.read("a.weight")


# --- hostile names --------------------------------------------------------------------------------------------------


def test_hostile_tensor_names_are_data(tmp_path: Path) -> None:
    names = ["../../x", "/etc/passwd", "(a+)+$", "{layer}", "%s%n", "\x1b[31mred\n", "\0", "con", "a" * 100_000]
    header = {name: entry(4 * i, 4 * i + 4) for i, name in enumerate(names)}
    folder = tmp_path / "some" / "folder"
    make_single(folder)
    raw_safetensors(folder / "model.safetensors", header, bytes(4 * len(names)))
    before = contents(tmp_path)
    with Checkpoint(folder) as checkpoint:
        assert list(checkpoint.tensors) == names
        assert all(torch.equal(checkpoint.read(name), torch.zeros(1)) for name in names)
    assert contents(tmp_path) == before
    raw_safetensors(folder / "model.safetensors", {"\x1b[31mred\n" + "a" * 1000: entry(dtype="no")})
    message = refused(folder, "unknown dtype")
    assert message.isprintable()
    assert len(message) < 600


# --- pickled files --------------------------------------------------------------------------------------------------


class Payload:
    """Runs code when an ordinary unpickler loads it."""

    ran = False

    def __reduce__(self) -> Any:
        return run_payload, ()


def run_payload() -> dict[str, torch.Tensor]:
    Payload.ran = True
    return {"a": torch.zeros(1)}


class Subclass(torch.Tensor):
    pass


def make_bin(folder: Path, value: Any, **how: Any) -> Path:
    (folder / "config.json").write_text("{}")
    torch.save(value, folder / "pytorch_model.bin", **how)
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize(("zipped", "tells"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("wrapped", [True, False])
def test_pickled_tensors(
    tmp_path: Path, zipped: bool, tells: bool, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of zip files also with a torch that does not tell where the data lies."""
    monkeypatch.setattr(pickled, "TELLS_PLACES", tells)
    shared = torch.randn(4, 4)
    tensors = {
        **small_tensors(),
        "strided": shared.t(),
        "part": shared[1:3, ::2],
        "scalar": torch.tensor(2, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3).bfloat16()),
    }
    value = {"state_dict": OrderedDict(tensors), "step": 3} if wrapped else tensors
    make_bin(tmp_path, value, _use_new_zipfile_serialization=zipped)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            read = checkpoint.read(name)
            assert checkpoint.tensors[name].shape == tuple(tensor.shape)
            assert same_bits(read, tensor.detach())
            assert type(read) is torch.Tensor
            assert not read.requires_grad
            read.zero_()
            assert same_bits(checkpoint.read(name), tensor.detach())  # it was a private copy


@pytest.mark.parametrize("legacy", [False, True])
def test_an_epoch_next_to_the_tensors_is_ignored(tmp_path: Path, legacy: bool) -> None:
    tensors = small_tensors()
    notes = {"epoch": 3, "loss": 0.5, "name": "best", "best": True, "scheduler": None}
    make_bin(tmp_path, {**tensors, **notes}, _use_new_zipfile_serialization=not legacy)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        assert all(same_bits(checkpoint.read(name), tensor.detach()) for name, tensor in tensors.items())


def test_pickled_shards(tmp_path: Path) -> None:
    tensors = small_tensors()
    (tmp_path / "config.json").write_text("{}")
    index = {name: f"pytorch_model-{i}.bin" for i, name in enumerate(tensors)}
    for name, file in index.items():
        torch.save({name: tensors[name]}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with Checkpoint(tmp_path) as checkpoint:
        assert all(same_bits(checkpoint.read(name), tensors[name]) for name in [*tensors, *tensors])
    (tmp_path / "pytorch_model-1.bin").unlink()
    refused(tmp_path, "missing")


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickle_payload_is_refused_and_not_run(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = make_bin(tmp_path, {"a": torch.zeros(1), "b": Payload()}, _use_new_zipfile_serialization=form == "zip")
    if form == "pickle":
        path.write_bytes(pickle.dumps(Payload()))
    events: list[str] = []
    watching = True
    sys.addaudithook(lambda event, _: events.append(event) if watching else None)
    refused(tmp_path, "refused: .*nothing of it was run")
    watching = False
    assert not Payload.ran
    assert not {event for event in events if event.startswith(("os.system", "subprocess", "os.exec", "socket"))}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.zeros(1)], "holds a list"),
        (torch.zeros(1), "holds a Tensor"),
        ({"model": {"a": torch.zeros(1)}}, "'model': is a dict"),
        ({"a": torch.zeros(1), "steps": [3]}, "'steps': is a list"),
        ({"step": 3}, "'step': is a int"),
        ({1: torch.zeros(1)}, "name is a int"),
        ({"a": torch.eye(2).to_sparse()}, "not a plain tensor|more than plain tensors"),  # torch 2.15 refuses it first
        ({"a": torch.zeros(2, device="meta")}, "not a plain tensor"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "has the dtype"),
        ({"a": torch.zeros(1).expand(1 << 40)}, "larger than its stored data"),
        ({"a": torch.zeros(2).as_subclass(Subclass)}, "refused|is a Subclass"),
    ],
)
def test_pickle_that_is_no_flat_dict_of_plain_tensors(tmp_path: Path, value: Any, message: str) -> None:
    make_bin(tmp_path, value)
    refused(tmp_path, message)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors(tmp_path: Path) -> None:
    make_bin(tmp_path, {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)})
    refused(tmp_path, "not a plain tensor|refused")


def test_subclass_is_refused_even_when_allowed_to_load(tmp_path: Path) -> None:
    make_bin(tmp_path, {"a": torch.zeros(2).as_subclass(Subclass)})
    with torch.serialization.safe_globals([Subclass]):
        refused(tmp_path, "is a Subclass")


def rewrite_zip(path: Path, change: Callable[[str, bytes], bytes], **how: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", **how) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))


def test_zip_bomb(tmp_path: Path) -> None:
    path = make_bin(tmp_path, {"a": torch.zeros(1000)})
    rewrite_zip(path, lambda _, data: data, compression=zipfile.ZIP_DEFLATED)
    refused(tmp_path, "zip bomb")


def test_compressed_zip_that_is_no_smaller(tmp_path: Path) -> None:
    path = make_bin(tmp_path, {"a": torch.randint(0, 256, (5000,), dtype=torch.uint8)})
    rewrite_zip(path, lambda _, data: data, compression=zipfile.ZIP_DEFLATED)
    refused(tmp_path, "compressed")


def test_zip_records_that_overlap(tmp_path: Path) -> None:
    path = make_bin(tmp_path, {"a": torch.zeros(10_000)})
    with zipfile.ZipFile(path, "a") as archive:
        whole = next(member for member in archive.infolist() if member.filename.endswith("data/0"))
        again = copy.copy(whole)
        again.filename = whole.filename[:-1] + "1"
        archive.filelist.append(again)
        archive._didModify = True  # type: ignore[attr-defined]
    refused(tmp_path, "overlapping")


def test_zip_of_too_many_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bin(tmp_path, {"a": torch.zeros(4)})
    monkeypatch.setattr(pickled, "MAX_TENSORS", 2)
    refused(tmp_path, "more than 2 tensors")


def test_zip_record_twice(tmp_path: Path) -> None:
    path = make_bin(tmp_path, {"a": torch.zeros(4)})
    with zipfile.ZipFile(path, "a") as archive:
        name = next(name for name in archive.namelist() if name.endswith("data/0"))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(name, bytes(range(16)))
    refused(tmp_path, "there twice")


def test_zip_record_shorter_than_its_tensor(tmp_path: Path) -> None:
    path = make_bin(tmp_path, {"a": torch.ones(100)})
    rewrite_zip(path, lambda name, data: data[:8] if name.endswith("data/0") else data)
    refused(tmp_path, "larger than their stored data")


@pytest.mark.parametrize("read", [pickled.headers, pickled.load])
def test_zip_record_shorter_than_its_tensor_as_torch_26_reads_it(
    tmp_path: Path, read: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what happens to follow in memory; another record of the right size does not count."""
    tensors = {"a": torch.ones(100), "b": torch.ones(100), "c": torch.ones(50)}
    path = make_bin(tmp_path, tensors)
    monkeypatch.setattr(pickled, "TELLS_PLACES", False)
    monkeypatch.setattr(pickled.torch, "load", lambda *arguments, **settings: tensors)
    read(path)
    rewrite_zip(path, lambda name, data: data[:8] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match="larger than their stored data"):
        read(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_shape_larger_than_the_storage(tmp_path: Path, zipped: bool) -> None:
    path = make_bin(tmp_path, {"a": torch.ones(2)}, _use_new_zipfile_serialization=zipped)
    short, long = b"K\x02\x85", b"J\xff\xff\xff\x07\x85"  # the pickled shape (2,) and (2**27 - 1,)
    if zipped:
        rewrite_zip(path, lambda name, data: data.replace(short, long) if name.endswith("data.pkl") else data)
    else:
        path.write_bytes(path.read_bytes().replace(short, long))
    refused(tmp_path, "larger than their stored data|wrong byte size")


def test_bad_checksum(tmp_path: Path) -> None:
    values = torch.arange(1000, dtype=torch.float32)
    path = make_bin(tmp_path, {"a": values})
    data = path.read_bytes()
    at = data.index(values.numpy().tobytes()[400:800])
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="wrong checksum"):
        checkpoint.read("a")


@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_pickle_file(tmp_path: Path, zipped: bool) -> None:
    path = make_bin(tmp_path, {"a": torch.ones(1000)}, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        refused(tmp_path, "download it again|refused")


def test_pickle_lfs_pointer(tmp_path: Path) -> None:
    make_bin(tmp_path, {}).write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, "git lfs pull")


# --- NaN and Inf ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_nonfinite_is_counted(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 700_000)
    tensor[0, 0], tensor[1, 7], tensor[2, -1] = float("nan"), float("inf"), float("-inf")
    assert nonfinite(tensor.to(dtype)) == 3
    assert nonfinite(tensor.to(dtype).t()) == 3
    assert nonfinite(torch.zeros(3).to(dtype)) == 0


def test_nonfinite_of_integers_and_nothing() -> None:
    assert nonfinite(torch.tensor([2**31 - 1])) == 0
    assert nonfinite(torch.tensor(True)) == 0
    assert nonfinite(torch.zeros(0)) == 0
    assert nonfinite(torch.tensor(float("nan"))) == 1
    assert nonfinite(torch.tensor([0x7F, 0x00], dtype=torch.uint8).view(torch.float8_e4m3fn)) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_with_an_infinite_sum(dtype: torch.dtype) -> None:
    largest = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert nonfinite(largest) == 0
    largest[7] = float("nan")
    assert nonfinite(largest) == 1
    assert nonfinite(torch.tensor([float("inf"), float("-inf"), 1.0], dtype=dtype)) == 2


def test_parts_are_the_elements_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "PART", 64)
    tensors = make_single(tmp_path, {"a": torch.randn(7, 11), "b": torch.randn(16).double(), "none": torch.zeros(0, 3)})
    with Checkpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            parts = [part.clone() for part in checkpoint.parts(name)]
            assert all(part.nbytes <= 64 and part.ndim == 1 for part in parts)
            assert same_bits(torch.cat([*parts, tensor[:0].reshape(-1)]), tensor.reshape(-1))
        parts = checkpoint.parts("a")
        next(parts)
        os.truncate(tmp_path / "model.safetensors", 400)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            list(parts)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            checkpoint.parts("a")


def test_a_pickled_file_cut_short_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a memory map the system would kill the process."""
    monkeypatch.setattr(safetensors_io, "PART", 1 << 16)
    path = make_bin(tmp_path, {"a": torch.randn(1 << 20), "strided": torch.randn(1024, 1024).t()})
    with Checkpoint(tmp_path) as checkpoint:
        parts = checkpoint.parts("a")
        next(parts)
        read_tensor = safetensors_io.read_tensor

        def cut(file: Any, info: Any) -> Any:
            os.truncate(path, 1 << 16)
            return read_tensor(file, info)

        monkeypatch.setattr("blockformer.files.checkpoint.read_tensor", cut)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            checkpoint.read("strided")
        with pytest.raises(CheckpointError, match="changed while it was read"):
            list(parts)


def test_a_pickled_file_of_a_big_endian_machine(tmp_path: Path) -> None:
    path = make_bin(tmp_path, {"a": torch.zeros(4)})
    rewrite_zip(path, lambda name, data: b"big" if name.endswith("byteorder") else data)
    refused(tmp_path, "written on a big-endian machine")


def test_parts_of_a_pickled_tensor(tmp_path: Path) -> None:
    make_bin(tmp_path, {"a": torch.arange(6.0).reshape(2, 3).t()})
    with Checkpoint(tmp_path) as checkpoint:
        (part,) = checkpoint.parts("a")
    assert part.tolist() == [0, 3, 1, 4, 2, 5]
