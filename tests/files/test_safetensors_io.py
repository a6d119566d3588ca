"""The strict header parser and the streaming writer of one file."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import BODY, entry, raw_safetensors, same_bits
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockformer.files.errors import CheckpointError, ConversionError
from blockformer.files.safetensors_io import DTYPES, MAX_TENSORS, SafetensorsWriter, read_header, read_tensor


def parse(path: Path) -> list[Any]:
    with open(path, "rb", buffering=0) as file:
        return read_header(file, path)


@pytest.mark.parametrize("size", range(8))
def test_too_few_bytes(tmp_path: Path, size: int) -> None:
    (tmp_path / "x").write_bytes(b"\2\0\0\0\0\0\0"[:size])
    with pytest.raises(CheckpointError, match="too few"):
        parse(tmp_path / "x")


@pytest.mark.parametrize("length", [3, 100_000_001, 2**63, 2**64 - 1])
def test_header_longer_than_the_file_or_the_limit(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    if length == 100_000_001:
        os.truncate(path, 200_000_000)  # sparse: the file itself is long enough
    with pytest.raises(CheckpointError, match="its header claims"):
        parse(path)


def test_lfs_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        parse(tmp_path / "x")


BAD_HEADERS = {
    "not utf-8": (b'{"\xff": 1}', "UTF-8"),
    "not json": (b"{", "Expecting"),
    "not an object": (b"[1]", "begin with"),
    "space first": (b' {"a": 1}', "begin with"),
    "nested deeply": (b'{"a":' + b"[" * 100_000, "nested"),
    "nan": (b'{"a": NaN}', "NaN"),
    "huge number": (b'{"a":' + b"9" * 10_000 + b"}", "limit|digits"),
    "lone surrogate": (b'{"\\ud800": ' + json.dumps(entry()).encode() + b"}", "Unicode"),
    "name twice": (
        b'{"a": ' + json.dumps(entry(0, 8)).encode() + b', "a": ' + json.dumps(entry(8)).encode() + b"}",
        "twice",
    ),
    "name twice, same range": (b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), "twice"),
    "field twice": (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}', "twice"),
    "metadata not strings": ({"__metadata__": {"a": 1}, "a": entry()}, "__metadata__"),
    "metadata not an object": ({"__metadata__": "pt", "a": entry()}, "__metadata__"),
    "entry not an object": ({"a": [0, 16]}, "must have"),
    "field missing": ({"a": {"dtype": "F32", "shape": [4]}}, "must have"),
    "field unknown": ({"a": {**entry(), "strides": [1]}}, "nothing else"),
    "dtype unknown": ({"a": entry(dtype="F31")}, "unknown dtype"),
    "dtype no string": ({"a": entry(dtype=["F32"])}, "unknown dtype"),
    "shape negative": ({"a": entry(shape=[-2, -2])}, "bad shape"),
    "shape boolean": ({"a": entry(shape=[4, True])}, "bad shape"),
    "shape float": ({"a": entry(shape=[4.0])}, "bad shape"),
    "shape no list": ({"a": entry(shape=4)}, "bad shape"),
    "rank too high": ({"a": entry(shape=[4, *[1] * 64])}, "bad shape"),
    "shape overflows": ({"a": entry(0, 0, shape=[2**62, 2**62, 0])}, "has the shape"),
    "shape wraps to fit": ({"a": entry(shape=[2**62 + 1, 4])}, "has the shape"),
    "size other than range": ({"a": entry(shape=[3])}, "has the shape"),
    "offsets negative": ({"a": entry(-16, 0)}, "bad data_offsets"),
    "offsets overflow": ({"a": entry(2**64, 2**64 + 16)}, "bad data_offsets"),
    "offsets reversed": ({"a": entry(16, 0)}, "bad data_offsets|bad shape"),
    "offsets of three": ({"a": {**entry(), "data_offsets": [0, 8, 16]}}, "bad data_offsets"),
    "hole at the start": ({"a": entry(4, 16)}, "hole"),
    "hole": ({"a": entry(0, 4), "b": entry(8, 16)}, "hole"),
    "overlap": ({"a": entry(0, 12), "b": entry(8, 16)}, "overlaps"),
    "same range": ({"a": entry(), "b": entry()}, "overlaps"),
    "trailing bytes": ({"a": entry(0, 12)}, "followed by other bytes"),
    "body truncated": ({"a": entry(0, 20)}, "truncated"),
    "nothing but a body": ({}, "followed by other bytes"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header(tmp_path: Path, case: str) -> None:
    header, message = BAD_HEADERS[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(raw_safetensors(tmp_path / "x", header))
    assert str(tmp_path / "x") in str(caught.value)


def test_any_order_of_entries_is_read_in_file_order(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "x", {"b": entry(8, 16), "empty": entry(8, 8), "a": entry(0, 8)})
    infos = parse(path)
    assert [info.name for info in infos] == ["a", "empty", "b"]
    with open(path, "rb", buffering=0) as file:
        assert read_tensor(file, infos[2]).numpy().tobytes() == BODY[8:]


@pytest.mark.parametrize("count", [300_000, MAX_TENSORS])
def test_very_many_tensors(tmp_path: Path, count: int) -> None:
    one = '"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    path = raw_safetensors(tmp_path / "x", ("{" + ",".join(one % i for i in range(count)) + "}").encode(), b"")
    began = time.process_time()
    if count > MAX_TENSORS:
        with pytest.raises(CheckpointError, match=f"more than {MAX_TENSORS} tensors"):
            parse(path)
    else:
        assert len(parse(path)) == count
    assert time.process_time() - began < 10  # about one second; a quadratic check would take minutes


def test_much_json_without_tensors_is_refused_before_parsing(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "x", b'{"a":[' + b"0," * 20_000_000 + b"0]}")
    began = time.process_time()
    with pytest.raises(CheckpointError, match="more than"):
        parse(path)
    assert time.process_time() - began < 1


def test_file_that_shrinks_while_read(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "x", {"a": entry()})
    with open(path, "rb", buffering=0) as file:
        (info,) = read_header(file, path)
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            read_tensor(file, info)


def test_tensor_too_large_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "x"
    raw_safetensors(path, {"a": entry(0, 2**43)}, b"")
    try:
        os.truncate(path, path.stat().st_size + 2**43)  # 8 TiB, sparse
    except OSError:
        pytest.skip("the file system has no sparse files of this size")
    with open(path, "rb", buffering=0) as file:
        (info,) = read_header(file, path)
        with pytest.raises(CheckpointError, match=r"no memory for 'a'"):
            read_tensor(file, info)


dtype_names = st.sampled_from(sorted(DTYPES))
shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def bit_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and shape with random bits (NaN payloads, denormals, -0), strided in some way."""
    dtype, shape = DTYPES[draw(dtype_names)], draw(shapes)
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    data = torch.frombuffer(bytearray(draw(st.binary(min_size=count, max_size=count)) + b"\0"), dtype=torch.uint8)[
        :count
    ]
    data = data % 2 if dtype is torch.bool else data.clone()
    tensor = data.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=st.lists(bit_tensors(), min_size=1, max_size=6), order=st.randoms(use_true_random=False))
@example(tensors=[torch.tensor(1.5), torch.zeros(0, 3)], order=None)
def test_written_files_load_everywhere_bit_for_bit(tmp_path: Path, tensors: list[torch.Tensor], order: Any) -> None:
    path = tmp_path / "x.safetensors"
    path.unlink(missing_ok=True)
    named = {f"t.{index}": tensor for index, tensor in enumerate(tensors)}
    names = list(named)
    if order is not None:
        order.shuffle(names)  # which may end the example, so no file may be open yet
    writer = SafetensorsWriter(path, [(name, tensor.dtype, tensor.shape) for name, tensor in named.items()])
    for name in names:
        writer.write_parts(name, [named[name]])
    writer.finish()
    theirs = load_file(path)
    assert theirs.keys() == named.keys()
    with open(path, "rb", buffering=0) as file:
        for info in read_header(file, path):
            assert info.offset % info.dtype.itemsize == 0  # aligned, as the library writes it
            assert same_bits(read_tensor(file, info), named[info.name])
            assert same_bits(theirs[info.name], named[info.name])
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=st.lists(bit_tensors(), max_size=6))
def test_files_of_the_library_read_bit_for_bit(tmp_path: Path, tensors: list[torch.Tensor]) -> None:
    path = tmp_path / "x.safetensors"
    named = {f"t.{index}": tensor.contiguous() for index, tensor in enumerate(tensors)}
    save_file(named, path)
    with open(path, "rb", buffering=0) as file:
        infos = read_header(file, path)
        assert {info.name for info in infos} == named.keys()
        assert all(same_bits(read_tensor(file, info), named[info.name]) for info in infos)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_escapes_as_another_error(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x"
    whole = raw_safetensors(path, {"a": entry(0, 8), "b": entry(8, 16)}).read_bytes()
    at = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:at] + data.draw(st.binary(max_size=4)) + whole[at + data.draw(st.integers(0, 4)) :])
    try:
        infos = parse(path)
    except CheckpointError:
        return
    assert sum(info.nbytes for info in infos) <= path.stat().st_size


def test_negated_and_conjugated_views_are_written_as_they_look(tmp_path: Path) -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    views = {"conj": tensor.conj(), "neg": tensor.conj().imag}
    writer = SafetensorsWriter(tmp_path / "x", [(name, view.dtype, view.shape) for name, view in views.items()])
    for name, view in views.items():
        writer.write_parts(name, [view])
    writer.finish()
    loaded = load_file(tmp_path / "x")
    assert all(torch.equal(loaded[name], view) for name, view in views.items())


def test_one_element_with_an_odd_stride(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(3, 2)[1:2, :1].t()
    assert tensor.is_contiguous()
    writer = SafetensorsWriter(tmp_path / "x", [("a", tensor.dtype, tensor.shape)])
    writer.write_parts("a", [tensor])
    writer.finish()
    assert torch.equal(load_file(tmp_path / "x")["a"], tensor)


def test_writer_refuses_what_was_not_planned(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "x", [("a", torch.float32, (2,)), ("b", torch.float32, (2,))])
    with pytest.raises(ConversionError, match="not planned"):
        writer.write_parts("c", [torch.zeros(2)])
    with pytest.raises(ConversionError, match="not the planned tensor"):
        writer.write_parts("a", [torch.zeros(3)])
    with pytest.raises(ConversionError, match="not the planned tensor"):
        writer.write_parts("a", [torch.zeros(2, dtype=torch.float64)])
    writer.write_parts("a", [torch.zeros(2)])
    with pytest.raises(ConversionError, match="written already"):
        writer.write_parts("a", [torch.zeros(2)])
    with pytest.raises(ConversionError, match="not written"):
        writer.finish()
    writer.abandon()


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        ([("a", torch.float32, (1,))] * 2, "twice"),
        ([("__metadata__", torch.float32, (1,))], "reserved"),
        ([("a", torch.complex128, (1,))], "cannot hold"),
        ([("\ud800", torch.float32, (1,))], "Unicode"),
    ],
)
def test_writer_refuses_an_impossible_plan(tmp_path: Path, planned: list[Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        SafetensorsWriter(tmp_path / "x", planned)
    assert not (tmp_path / "x").exists()


def test_writer_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "x", [("a", torch.float32, (1,))])
    assert (tmp_path / "x").read_text() == "mine"
