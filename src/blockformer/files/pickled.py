"""Pickled checkpoints (`pytorch_model.bin`): read only by `torch.load(weights_only=True)`, after our own checks.

Accepted: a flat dict of names to plain tensors (numbers and texts among them, such as an epoch, are ignored), or that
dict under a well-known key (`{"state_dict": {...}, ...}`, as training frameworks write it; anything next to it is
ignored). In a folder only the key `state_dict` counts; in a
weight file that a user names it may be any one of `STATE_DICTS`. Two of them in one file, or one of them next to
tensors with names like a module's ("head.weight"), are refused, because it would be a guess which is the model.
Everything else is refused.

In today's zip files torch only says which tensors there are and where their data lies; the data is read like that
of a safetensors file, so nothing is mapped into memory and a file cut short meanwhile is an error. Files from before
torch 1.6 are read whole, and by a torch that does not say where data lies (2.6) all are.
"""

import zipfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .errors import CheckpointError, listed, shown
from .names import STATE_DICTS, under_a_key
from .other_formats import in_place_of_pickle
from .regular import LFS_POINTER, open_regular, refuse_pointer
from .safetensors_io import DTYPE_NAMES, MAX_TENSORS, TensorInfo, read_tensor

ZIP = b"PK\x03\x04"
TELLS_PLACES = hasattr(torch.UntypedStorage, "_checkpoint_offset")
BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How torch's files from before 1.6 begin: a pickled number."""
OF_NUMPY = (
    "a pickle of NumPy arrays, and not of tensors (nothing of it was run); where you trust it, load it with the code "
    "that wrote it, and save the arrays with safetensors.numpy.save_file as model.safetensors"
)
_NOTES = (bool, int, float, str, type(None))
"""What a training script writes next to tensors: its epoch, its best loss, its name."""
RESAVE = "save it again as safetensors with a tool that you trust"


def headers(path: Path, wrappers: Collection[str] = STATE_DICTS[:1]) -> tuple[list[TensorInfo], str | None]:
    """Every tensor of a pickled file, and the key that they lie under, if any. Of a zip file no data is read.

    Args:
        path: the file.
        wrappers: keys of which one may hold the tensors.

    Raises:
        CheckpointError: damaged, compressed, or holding more than plain tensors, such as code to run.
    """
    with open_regular(path) as file:
        records = records_of(file, path) if _is_zip(file, path) else None
        if records is None or not TELLS_PLACES:
            tensors, key = _read_by_torch(file, path, wrappers)
            return [TensorInfo(name, t.dtype, tuple(t.shape), path) for name, t in tensors.items()], key
        tensors, key = _state_dict(_unpickled(file, path, "meta"), path, wrappers, "meta")
    return [_placed(name, tensor, path, records) for name, tensor in tensors.items()], key


def load(path: Path, wrappers: Collection[str] = STATE_DICTS[:1]) -> dict[str, Tensor]:
    """All tensors of a pickled file, its checksums compared; the arguments and errors are as in `headers`."""
    with open_regular(path) as file:
        check_sums(file, path)
        if not (_is_zip(file, path) and TELLS_PLACES):
            return _read_by_torch(file, path, wrappers)[0]
        return {info.name: read_tensor(file, info) for info in headers(path, wrappers)[0]}


def check_sums(file: BinaryIO, path: Path) -> None:
    """Read an open file once and compare the checksums of its records; files from before torch 1.6 have none.

    Raises:
        CheckpointError: one is wrong.
    """
    if not _is_zip(file, path):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except Exception as error:  # of a damaged file the library raises nearly anything
        raise _damaged(path, error) from error
    if damaged is not None:
        raise CheckpointError(f"{path}: wrong checksum of {shown(damaged)}; download it again")


def _is_zip(file: BinaryIO, path: Path) -> bool:
    file.seek(0)
    start = file.read(len(LFS_POINTER))
    file.seek(0)
    refuse_pointer(start, path)
    if start[:4] != ZIP and (other := in_place_of_pickle(start)) is not None:
        raise CheckpointError(f"{path}: {other}")
    return start[:4] == ZIP


def _unpickled(file: BinaryIO, path: Path, device: str) -> Any:
    """What torch makes of an open file; on the device "meta" it reads no tensor's data."""
    file.seek(0)
    try:
        return torch.load(file, map_location=device, weights_only=True, mmap=False)
    except Exception as error:
        if _is_of_numpy(file):
            raise CheckpointError(f"{path}: {OF_NUMPY}") from error
        raise CheckpointError(
            f"{path}: refused: damaged, or more than plain tensors in it (nothing of it was run); {RESAVE}. "
            f"{_reason(error)}"
        ) from error


def _read_by_torch(file: BinaryIO, path: Path, wrappers: Collection[str]) -> tuple[dict[str, Tensor], str | None]:
    """As `_state_dict`, with the data. Torch 2.6 does not look whether a record is as long as its tensor."""
    tensors, key = _state_dict(_unpickled(file, path, "cpu"), path, wrappers, "cpu")
    storages = {each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors.values())}
    if _is_zip(file, path) and not Counter(storages.values()) <= Counter(records_of(file, path).values()):
        raise _too_large(path)
    return tensors, key


def _is_of_numpy(file: BinaryIO) -> bool:
    """Whether a pickled file holds arrays of NumPy, and no tensors."""
    file.seek(0)
    start = file.read(1 << 16)
    if start[:4] != ZIP:
        return b"numpy" in start and not start.startswith(BEFORE_ZIP)
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            has_tensors = any("/data/" in name for name in archive.namelist())
            return not has_tensors and any(b"numpy" in archive.open(each).read(1 << 16) for each in pickles)
    except Exception:  # of a damaged file the library raises nearly anything
        return False


def _reason(error: Exception) -> str:
    """Torch's reason in one printable line, without its advice to load the file anyway."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    return "".join(letter if letter.isprintable() else " " for letter in text[:300]) or type(error).__name__


def records_of(file: BinaryIO, path: Path) -> dict[int, int]:
    """Where each record of a zip file begins -> its bytes; none is compressed, repeated or overlaps another.

    Raises:
        CheckpointError: it is damaged, one is, or it was written on a big-endian machine.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > 2 * MAX_TENSORS:
                raise CheckpointError(f"{path}: more than {MAX_TENSORS} tensors")
            if len({member.filename for member in members}) < len(members):
                raise CheckpointError(f"{path}: a zip record is there twice; {RESAVE}")
            if any(member.filename.endswith("/constants.pkl") for member in members):
                raise CheckpointError(
                    f"{path}: a program of TorchScript (torch.jit.save), and not a state dict; save "
                    "torch.jit.load(FILE).state_dict(), which runs its code"
                )
            stored = sum(member.file_size for member in members)
            if any(member.compress_type != zipfile.ZIP_STORED for member in members) or stored > path.stat().st_size:
                raise CheckpointError(f"{path}: compressed or overlapping zip records (a zip bomb?); {RESAVE}")
            orders = [archive.read(member) for member in members if member.filename.endswith("/byteorder")]
        if any(order != b"little" for order in orders):
            raise CheckpointError(f"{path}: written on a big-endian machine; {RESAVE}")
        return {record_begin(file, member): member.file_size for member in members}
    except CheckpointError:
        raise
    except Exception as error:  # of a damaged file the library raises nearly anything
        raise _damaged(path, error) from error


def record_begin(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Where the data of a record begins: after its own header of 30 bytes, a name and extra fields."""
    file.seek(member.header_offset)
    header = file.read(30)
    return member.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: damaged zip file ({shown(error)}); download it again")


def _too_large(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: tensors that are larger than their stored data; download it again")


def _placed(name: str, tensor: Tensor, path: Path, records: dict[int, int]) -> TensorInfo:
    """The header of a tensor that torch made without data; its storage must be a whole record."""
    place = _place(tensor)
    if place is None or records.get(place) != tensor.untyped_storage().nbytes():
        raise _too_large(path)
    begin = place + int(tensor.storage_offset()) * tensor.dtype.itemsize
    strides = None if tensor.is_contiguous() else tensor.stride()
    return TensorInfo(name, tensor.dtype, tuple(tensor.shape), path, begin, strides)


def _place(tensor: Tensor) -> int | None:
    """Where in its file the storage of a tensor without data begins; None: the file has no data for it."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def _state_dict(
    loaded: Any, path: Path, wrappers: Collection[str], device: str
) -> tuple[dict[str, Tensor], str | None]:
    """The flat dict of plain tensors in a loaded file, unwrapped, and the key that it lay under."""
    found = [key for key in wrappers if isinstance(loaded, dict) and isinstance(loaded.get(key), dict)]
    if found:
        others = [str(name) for name, value in loaded.items() if isinstance(value, Tensor) and "." in str(name)]
        if len(found) > 1 or others:
            named = ", ".join(map(shown, [*found[1:], *others[:3]]))
            raise CheckpointError(
                f"{path}: {shown(found[0])} and also {named}: which is the model? Save only its state dict"
            )
        loaded = loaded[found[0]]
    inner = _keys_of_tensors(loaded) if isinstance(loaded, dict) else []
    if inner and inner[0] not in found:
        raise CheckpointError(f"{path.parent}: {under_a_key(inner[0])}")
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: holds a {type(loaded).__name__}, not a dict of names to tensors; {RESAVE}")
    if any(isinstance(value, Tensor) for value in loaded.values()):
        loaded = {name: value for name, value in loaded.items() if type(value) not in _NOTES}
    problems = [
        f"{shown(name)}: {problem}" for name, value in loaded.items() if (problem := _fault(name, value, device))
    ]
    if problems:
        raise CheckpointError(f"{path}: not a flat dict of names to plain tensors; {RESAVE}:{listed(problems)}")
    return {name: tensor.detach() for name, tensor in loaded.items()}, found[0] if found else None


def _keys_of_tensors(loaded: dict[Any, Any]) -> list[str]:
    """The keys of a pickled dict that hold dicts of tensors: well-known ones and, where it has no tensors, any."""
    is_flat = any(isinstance(value, Tensor) for value in loaded.values())
    inner = {key: value for key, value in loaded.items() if type(key) is str and isinstance(value, dict)}
    others = () if is_flat else inner
    known = [key for key in STATE_DICTS if key in inner]
    return known or [key for key in others if any(isinstance(each, Tensor) for each in inner[key].values())]


def _fault(name: object, value: object, device: str) -> str | None:
    if type(name) is not str:
        return f"its name is a {type(name).__name__}"
    if type(value) not in (Tensor, torch.nn.Parameter):
        return f"is a {type(value).__name__}"
    assert isinstance(value, Tensor)
    plain = value.layout is torch.strided and not value.is_quantized and value.device.type == device
    if not plain or (device == "meta" and _place(value) is None):
        return f"is not a plain tensor ({value.layout}, {value.device})"
    if value.dtype not in DTYPE_NAMES:
        return f"has the dtype {value.dtype}"
    if value.nbytes > value.untyped_storage().nbytes():
        return "is larger than its stored data"
    return None
