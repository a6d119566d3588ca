"""Reading a checkpoint: which files belong to it, what they hold, one tensor at a time.

Which weights are read, first found wins (the order of transformers): `model.safetensors`,
`model.safetensors.index.json` with its shards, `pytorch_model.bin`, `pytorch_model.bin.index.json` with its shards. A
single file next to an index of the same kind is read, with a warning.

A checkpoint may also be a single weight file plus a file of settings; nothing else is then read.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from . import pickled
from .config_file import check_bounds, check_tensors, is_ours, read_config
from .containers import adapter_said, numbered_files, of_another_index, unfinished, what_it_is, without_config
from .earlier_names import present_name
from .errors import CheckpointError, ConversionError, listed, memory_errors, shown
from .json_files import read_json
from .model_place import AROUND, model_elsewhere
from .names import (
    FEW_BITS,
    PICKLED_SUFFIXES,
    STATE_DICTS,
    VARIANT,
    WEIGHT_NAMES,
    WEIGHTS,
    of_a_wrapper,
    roots_of,
    weight_map,
)
from .quantized import FIELDS, OUR_BITS, all_plain, packed_by_mlx, with_modelopt
from .regular import open_regular
from .safetensors_io import TensorInfo, read_header, read_parts, read_tensor
from .sources import Source
from .telling_tensors import not_a_model

__all__ = ["Checkpoint", "TensorInfo"]

Identity = tuple[int, int, int]


class Checkpoint:
    """An open checkpoint: every header checked, no tensor read yet. A context manager.

    Args:
        folder: has `config.json` and weights, in an official layout or ours; or, with `config`, one weight file.
        config: the JSON file with the settings of a weight file.
        weights: the names of the weights that are looked for; see `weights_of`.
        around: the folder around that of the model, whose files are read as if they lay next to it; see `laid_flat`.

    Attributes:
        folder: the folder, or the weight file.
        config: the content of `config.json` or of the settings file.
        tensors: name -> `TensorInfo`, in file order; of our layout by today's names, whatever the files have.
        wrapper: the key of a pickled file that its tensors lie under, as a training framework writes them; or None.

    Raises:
        CheckpointError: files are missing, damaged, contradict each other, or lie outside the folder.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        config: str | PathLike[str] | None = None,
        weights: tuple[tuple[str, str], ...] = WEIGHTS,
        around: Path | None = None,
    ):
        self.folder, self.weights, self.around = Path(folder), weights, around
        self._config_file = None if config is None else Path(config)
        self.config: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.wrapper: str | None = None
        self._identities: dict[Path, Identity] = {}
        self._file: tuple[Path, BinaryIO] | None = None
        self._pickled: tuple[Path, dict[str, Tensor]] | None = None
        self._verified: set[Path] = set()
        if self._config_file is None and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: not a folder")
        for attempt in range(3):  # another program may put a new folder into place just now
            before = _identity(self.folder)
            try:
                self._open()
                self.check_unchanged()
                return
            except CheckpointError:
                if attempt == 2 or _identity(self.folder) == before:
                    raise

    @property
    def is_file(self) -> bool:
        """Whether it is a single weight file, with a file of settings."""
        return self._config_file is not None

    def _open(self) -> None:
        self._identities, self.wrapper = {}, None
        if self._config_file is not None:
            self._identities = {path: _identity(path) for path in (self._config_file, self.folder)}
            self.config = read_json(self._config_file)
            check_bounds(self._config_file, self.config)
            self.tensors = {info.name: info for info in self._headers(self.folder)}
            return
        if elsewhere := model_elsewhere(self.folder):
            raise CheckpointError(f"{self.folder}: {elsewhere}")
        if not os.path.lexists(self.path("config.json")):
            raise CheckpointError(f"{self.folder}: {without_config(self.folder)}")
        self.config = read_config(self.member("config.json"))
        files, weight_map = self._weights()
        missing = [shown(name) for name in files if not (self.folder / name).exists()]
        if missing:
            there = numbered_files(self.folder)
            if len(missing) == len(files) and there and weight_map is not None:
                raise CheckpointError(f"{self.folder}: {'; '.join(of_another_index(files, there))}")
            raise CheckpointError(f"{self.folder}: files are missing; download them:{listed(missing)}")
        if what := unfinished(self.folder, files):
            raise CheckpointError(f"{self.folder}: {what}")
        self.tensors, problems = {}, []
        for name in files:
            for info in self._headers(self.member(name)):
                earlier = self.tensors.setdefault(info.name, info)
                if earlier is not info:
                    problems.append(f"{shown(info.name)} is in {shown(earlier.file.name)} and in {shown(name)}")
        if weight_map is not None:
            problems += self._differences(weight_map)
        if problems:
            raise CheckpointError(
                f"{self.folder}: the index and the shards do not agree:{listed(problems)}\n"
                f"Download them again; or `blockformer doctor {self.folder} --mend NEW` writes an index for the shards."
            )
        if packed := packed_by_mlx(self.tensors):
            raise CheckpointError(f"{self.folder}: {'; '.join(packed)}")
        of_ours = is_ours(self.config)
        if not of_ours and os.path.lexists(self.path(FEW_BITS[0])) and not all_plain(self.tensors):
            self.config = with_modelopt(self.config, read_json(self.member(FEW_BITS[0])))
        is_quantized = any(self.config.get(name) for name in (*FIELDS, OUR_BITS))
        if told := not_a_model(self.tensors, is_quantized):
            raise CheckpointError(f"{self.folder}: {'; '.join(told)}")
        check_tensors(self.folder, self.config, self.tensors)
        if problem := of_a_wrapper([*self.tensors, *([self.wrapper] if self.wrapper and of_ours else [])]):
            raise CheckpointError(f"{self.folder}: {problem}")
        if of_ours:
            self._read_earlier_names()

    def _read_earlier_names(self) -> None:
        placement = self.config.get("norm_placement", "pre")
        found: dict[str, TensorInfo] = {}
        for info in self.tensors.values():
            other = found.setdefault(present_name(info.name, placement), info)
            if other is not info:
                names = f"{shown(other.name)} and {shown(info.name)}"
                raise CheckpointError(f"{self.folder}: {names} are the old and the new name of one weight; remove one")
        self.tensors = found

    @property
    def inner(self) -> str:
        """The name of the model's folder in the one around it; "" without such a folder."""
        return "" if self.around is None else self.folder.relative_to(self.around).as_posix()

    def path(self, name: str) -> Path:
        """Where a file of the source is, or would be."""
        path = self.folder / name
        return path if self.around is None or os.path.lexists(path) else self.around / name.removeprefix(AROUND)

    def member(self, name: str) -> Path:
        """The path of a file of the source, noted for `check_unchanged`; links may not lead outside (`roots_of`)."""
        path = self.path(name)
        roots = roots_of(self.around or self.folder)
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: a link that leads nowhere") from error
        if path.is_symlink() and not real.exists():
            raise CheckpointError(f"{path}: a link to a file that is not there; download or copy the file itself")
        if not any(real.is_relative_to(root) for root in roots):
            raise CheckpointError(f"{path}: a link that leaves the folder; put the file itself there")
        self._identities[path] = _identity(path)
        return path

    def _weights(self) -> tuple[list[str], dict[str, str] | None]:
        """Names of the weight files, and the name -> file map of the index if there is one."""
        for single, index in self.weights:
            has_index = os.path.lexists(self.folder / index)
            if os.path.lexists(self.folder / single):
                if has_index:
                    warnings.warn(f"{self.folder} has both {single} and {index}; {single} is read", stacklevel=5)
                return [single], None
            if has_index:
                places = weight_map(self.member(index))
                return sorted(set(places.values())), places
        names = ", ".join(name for pair in self.weights for name in pair)
        raise CheckpointError(f"{self.folder}: no weights; one of {names} is needed{self._other_weights()}")

    def _other_weights(self) -> str:
        """How to read the weights that the folder has, where the chosen ones are missing; "" if it has none."""
        plain = [name for name in WEIGHT_NAMES if os.path.lexists(self.folder / name)]
        if plain:
            return f"; leave out variant and use_safetensors to read {plain[0]}"
        found = (VARIANT.fullmatch(path.name) for path in sorted(self.folder.iterdir()))
        there = sorted({match["variant"] for match in found if match})
        if there:
            return f"; with variant='{there[0]}' (--variant {there[0]}) others are read"
        what = what_it_is(self.folder)
        return "" if what is None else f"; {what}"

    def _headers(self, path: Path) -> list[TensorInfo]:
        if path.suffix in PICKLED_SUFFIXES:
            infos, key = pickled.headers(path, self._wrappers)
            self.wrapper = key or self.wrapper
            return infos
        with open_regular(path) as file:
            return read_header(file, path)

    @property
    def _wrappers(self) -> tuple[str, ...]:
        """Keys under which a pickled file may hold its tensors."""
        return STATE_DICTS if self._config_file is not None else STATE_DICTS[:1]

    def _differences(self, weight_map: dict[str, str]) -> list[str]:
        """Where the index contradicts the shards."""
        problems = []
        for name, file in weight_map.items():
            info = self.tensors.get(name)
            if info is None:
                problems.append(f"{shown(name)} is in the index but in no shard")
            elif info.file.name != file:
                problems.append(f"{shown(name)} is in {shown(info.file.name)}, not in {shown(file)}")
        extra = (name for name in self.tensors if name not in weight_map)
        return problems + [f"{shown(name)} is in a shard but not in the index" for name in extra]

    def read(self, name: str) -> Tensor:
        """A private, contiguous copy of one tensor, bit for bit.

        Raises:
            CheckpointError: the file changed since the checkpoint was opened.
            KeyError: no such tensor.
        """
        info = self.tensors[name]
        if info.offset < 0:
            return self._whole(info.file)[info.name].clone(memory_format=torch.contiguous_format)
        return read_tensor(self._opened(info.file), info)

    def parts(self, name: str) -> Iterator[Tensor]:
        """The elements of one tensor in order, flat, in parts of 1 MiB; each part overwrites the one before it.

        Several tensors can be read side by side.

        Raises:
            CheckpointError: the file changed since the checkpoint was opened.
            KeyError: no such tensor.
        """
        info = self.tensors[name]
        if info.offset < 0 or info.strides is not None:
            return iter([self.read(name).reshape(-1)])
        self._opened(info.file)  # compares checksums
        return self._streamed(info)

    def _streamed(self, info: TensorInfo) -> Iterator[Tensor]:
        with open_regular(info.file) as file:
            self._compare(info.file, os.fstat(file.fileno()))
            yield from read_parts(file, info)

    def _opened(self, path: Path) -> BinaryIO:
        if self._file is None or self._file[0] != path:
            self.close()
            self._file = (path, open_regular(path))
        file = self._file[1]
        self._compare(path, os.fstat(file.fileno()))
        if path.suffix in PICKLED_SUFFIXES and path not in self._verified:
            pickled.check_sums(file, path)
            self._verified.add(path)
        return file

    def _whole(self, path: Path) -> dict[str, Tensor]:
        """The tensors of one shard that torch reads only as a whole; one shard is held at a time."""
        self._compare(path, os.stat(path))
        if self._pickled is None or self._pickled[0] != path:
            self.close()
            self._pickled = (path, pickled.load(path, self._wrappers))
        return self._pickled[1]

    def check_unchanged(self) -> None:
        """Check that no file changed since the checkpoint was opened (size, modification time, inode).

        Raises:
            CheckpointError: names the first that changed.
        """
        for path in self._identities:
            try:
                self._compare(path, os.stat(path))
            except OSError as error:
                raise CheckpointError(f"{path}: vanished while it was read") from error

    def _compare(self, path: Path, status: os.stat_result) -> None:
        if _key(status) != self._identities[path]:
            raise CheckpointError(f"{path}: changed while it was read; run this again when nothing writes to it")

    def close(self) -> None:
        """Close open files. A later `read` opens them again."""
        if self._file is not None:
            self._file[1].close()
        self._file = self._pickled = None

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def opened(place: Source) -> Iterator[tuple[Checkpoint, list[str]]]:
    """The checkpoint of a source, and a list of notes that starts with warnings from opening it.

    Running out of memory is a ConversionError.

    Raises:
        ConversionError: it is the folder of a PEFT adapter, whose weights are not a whole model.
    """
    if found := adapter_said(place.path):
        raise ConversionError(f"{place.path}: {found[0]}; {found[1]}")
    with memory_errors():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint = Checkpoint(place.path, place.config, place.weights, place.around)
        with checkpoint:
            yield checkpoint, [str(warning.message) for warning in caught]


def _key(status: os.stat_result) -> Identity:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _identity(path: Path) -> Identity:
    try:
        return _key(os.stat(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
