"""Strict safetensors: headers are checked before any tensor is read; files are written one tensor at a time.

Layout of a file: 8 bytes little-endian N, then N bytes of JSON (padded with spaces) mapping each name to its dtype,
shape and byte range, then the data. See https://github.com/huggingface/safetensors#format. The parser refuses
anything that two readers could take in two ways.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from .atomic import start_writing
from .errors import CheckpointError, ConversionError, is_out_of_memory, shown
from .json_files import strict_json
from .other_formats import in_place_of_safetensors
from .regular import LFS_POINTER, refuse_pointer

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch >= 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
MAX_TENSORS = 100_000
"""Per file. The largest real shards hold a few thousand; more would only cost the reader time and memory."""
MAX_RANK = 64
PART = 1 << 20
"""Bytes read, checked and written together: they fit the processor's cache."""
WINDOW = 32 << 20
"""Bytes after which the system starts writing to disk."""


class HasHeader(Protocol):
    """What a plan needs to know of a tensor; `TensorInfo` and `torch.Tensor` both have it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""

    @property
    def shape(self) -> Sequence[int]:
        """The shape."""


def torch_name(dtype: torch.dtype | str) -> str:
    """What torch and `config.json` call a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 [nbytes]: a view if it is contiguous, else a copy."""
    flat = tensor.detach().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # not reshape: one element may keep a stride that no view allows
    return flat.view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bytes_of(one), bytes_of(other))


@dataclass(frozen=True)
class TensorInfo:
    """The header of a stored tensor.

    Attributes:
        name: its key.
        dtype: its dtype.
        shape: its shape.
        file: the file that holds it.
        offset: where the data begins in `file`, in bytes; -1 in pickles that torch reads only as a whole.
        strides: elements from one index to the next in each dimension; None: row by row, without gaps.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int = -1
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: BinaryIO, path: Path) -> list[TensorInfo]:
    """Every tensor of an open safetensors file, in the order of the data. No data is read.

    Raises:
        CheckpointError: the file is not exactly one header plus the data it describes.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(len(LFS_POINTER))
    refuse_pointer(start, path)
    if len(start) < 8:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file; download it again")
    length = int.from_bytes(start[:8], "little")
    is_possible = 0 < length <= min(MAX_HEADER, size - 8)
    if not is_possible and (other := in_place_of_safetensors(start)) is not None:
        raise CheckpointError(f"{path}: {other}")
    if not is_possible and start.isascii() and start.decode().isprintable():
        raise CheckpointError(
            f"{path}: a text that begins with {start.decode()!r}, not a safetensors file: the page or the message of a "
            "server was saved in its place; download it again"
        )
    if length > MAX_HEADER or length > size - 8:
        raise CheckpointError(
            f"{path}: damaged, or not a safetensors file: its header claims {length} bytes "
            f"(file: {size}, limit: {MAX_HEADER}); download it again"
        )
    file.seek(8)
    header = file.read(length)
    try:
        if len(header) != length:
            raise ValueError("the file ends within it")
        if header[:1] != b"{":
            raise ValueError("it does not begin with '{'")
        if header.count(b"{") > 2 * MAX_TENSORS or header.count(b",") > 16 * MAX_TENSORS:  # before the work of parsing
            raise ValueError(f"more than {MAX_TENSORS} tensors")
        entries = strict_json(header)
        return _tensors(entries, path, 8 + length, size - 8 - length)
    except ValueError as error:
        raise CheckpointError(f"{path}: bad safetensors header: {error}") from error


def _tensors(entries: dict[str, Any], path: Path, start: int, size: int) -> list[TensorInfo]:
    """The tensors of a header, checked against each other and the `size` bytes of data from `start`."""
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ must map strings to strings")
    if len(entries) > MAX_TENSORS:
        raise ValueError(f"more than {MAX_TENSORS} tensors")
    tensors = [_tensor(name, entry, path, start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            fault = "overlaps the one before it" if tensor.offset < end else "leaves a hole before it"
            raise ValueError(f"the data of {shown(tensor.name)} {fault}")
        end += tensor.nbytes
    if end != start + size:
        kind = "truncated" if end > start + size else "followed by other bytes"
        raise ValueError(f"the tensors take {end - start} bytes but {size} are there: {kind}; download it again")
    return tensors


def _tensor(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(name)} must have dtype, shape and data_offsets, and nothing else")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{shown(name)} has the unknown dtype {shown(entry['dtype'])}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise ValueError(f"{shown(name)} has a bad shape: non-negative integers are needed, at most {MAX_RANK}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{shown(name)} has bad data_offsets: [begin, end] is needed, from 0 on")
    info = TensorInfo(name, dtype, tuple(shape), path, start + offsets[0])
    overflows = math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63
    if overflows or info.nbytes != offsets[1] - offsets[0]:
        raise ValueError(f"{shown(name)} has the shape {shown(shape)} of {entry['dtype']}, but data_offsets {offsets}")
    return info


def _counts(values: Any) -> bool:
    """Whether this is a list of non-negative integers (no booleans) that fit 64 bits, signed."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as writable bytes."""
    if sys.byteorder != "little":
        raise ConversionError("safetensors files are little-endian, and this machine is not")
    data: Any = bytes_of(tensor).numpy()
    return memoryview(data)


def read_tensor(file: BinaryIO, info: TensorInfo) -> Tensor:
    """A private, contiguous copy of one tensor, bit for bit.

    The bytes are read straight into the new tensor. (A memory map would count as our memory, and a file truncated
    meanwhile would kill the process instead of raising.)
    """
    try:
        tensor = torch.empty(info.shape if info.strides is None else _span(info), dtype=info.dtype)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CheckpointError(f"{info.file}: no memory for {shown(info.name)} ({info.nbytes} bytes)") from error
    file.seek(info.offset)
    _fill(memory_of(tensor), file, info)
    return tensor if info.strides is None else tensor.as_strided(info.shape, info.strides).contiguous()


def _span(info: TensorInfo) -> int:
    """Elements from the first to the last of a tensor with strides, both counted."""
    steps = zip(info.shape, info.strides or (), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def read_parts(file: BinaryIO, info: TensorInfo) -> Iterator[Tensor]:
    """The elements of one tensor in order, flat, in parts of `PART` bytes, each overwriting the one before.

    A part stays in the processor's cache from reading to writing, which beats whole tensors at any size.
    """
    room = torch.empty(min(PART, info.nbytes), dtype=torch.uint8)
    file.seek(info.offset)
    for begin in range(0, info.nbytes, PART):
        part = room[: min(PART, info.nbytes - begin)]
        _fill(memory_of(part), file, info)
        yield part.view(info.dtype)


def _fill(rest: memoryview, file: BinaryIO, info: TensorInfo) -> None:
    """Fill a buffer from the file."""
    while rest:
        count = file.readinto(rest[: 1 << 30])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{info.file}: ended within {shown(info.name)}; it changed while it was read")
        rest = rest[count:]


class SafetensorsWriter:
    """Write a safetensors file with a known header, one tensor at a time, in any order.

    Dtypes with larger elements come first, as in the safetensors library, so every tensor is aligned; otherwise the
    planned order holds.

    Args:
        path: the file; it must not exist.
        planned: (name, dtype, shape) of every tensor.

    Raises:
        ConversionError: a repeated name, or a name or dtype that the format cannot hold.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, planned: Sequence[tuple[str, torch.dtype, Iterable[int]]]):
        self.path = path
        self._waiting: dict[str, TensorInfo] = {}
        offset = 0
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, dtype, sizes in sorted(planned, key=lambda tensor: -tensor[1].itemsize):
            shape = tuple(sizes)
            if name in entries:
                raise ConversionError(f"{path}: the tensor name {shown(name)} is planned twice, or reserved")
            if dtype not in DTYPE_NAMES:
                raise ConversionError(f"{path}: {shown(name)} is {dtype}, which safetensors cannot hold")
            info = self._waiting[name] = TensorInfo(name, dtype, shape, path, offset)
            offset += info.nbytes
            entries[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [info.offset, offset],
            }
        try:
            header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConversionError(f"{path}: a tensor name is not Unicode text") from error
        header += b" " * (-len(header) % 8)
        if len(header) > MAX_HEADER or len(entries) - 1 > MAX_TENSORS:
            raise ConversionError(f"{path}: too many tensors for one file; use a smaller max_shard_size")
        self._start = 8 + len(header)
        self._waits = 0
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        try:
            self._put(len(header).to_bytes(8, "little") + header)
        except BaseException:
            self._file.close()
            raise

    def write_parts(self, name: str, parts: Iterable[Tensor]) -> None:
        """Write one planned tensor from its elements in order: parts of any strides and device, of the planned size."""
        info = self._waiting.get(name)
        if info is None:
            raise ConversionError(f"{self.path}: {shown(name)} is not planned here, or written already")
        self._file.seek(self._start + info.offset)
        rest = info.nbytes
        for part in parts:
            plain = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
            rest -= plain.nbytes
            if plain.dtype != info.dtype or rest < 0:
                break
            self._put(memory_of(plain))
        if rest or self._start + info.offset + info.nbytes != self._file.tell():
            raise ConversionError(f"{self.path}: the parts of {shown(name)} are not the planned tensor")
        del self._waiting[name]

    def _put(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            count = self._file.write(rest[:WINDOW])
            rest = rest[count:]
            self._waits += count
            if self._waits >= WINDOW:
                start_writing(self._file.fileno())
                self._waits = 0

    def finish(self) -> None:
        """Sync and close the file, in which every planned tensor must be written."""
        if self._waiting:
            name = next(iter(self._waiting))
            raise ConversionError(
                f"{self.path}: {len(self._waiting)} planned tensors were not written, first {shown(name)}"
            )
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close an unfinished file."""
        self._file.close()
