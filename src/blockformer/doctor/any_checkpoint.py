"""Any folder or file with weights, opened as far as it goes: what a strict reader refuses becomes a finding here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from blockformer.conversion.rules.groups import Group, targets_of
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import read_config
from blockformer.files.errors import CheckpointError, ConversionError, listed, shown
from blockformer.files.json_files import read_json
from blockformer.files.names import FEW_BITS, PICKLED_SUFFIXES, STATE_DICTS
from blockformer.files.quantized import all_plain, with_modelopt
from blockformer.files.safetensors_io import TensorInfo

from .distributed import read_distributed
from .finding import ERROR, WARNING, Finding
from .llama2_c import LLAMA2_C, read_numbers
from .pickled_models import others_in, read_pickled_model
from .pieces import Pieced
from .rank_files import read_rank_files
from .weight_files import ADAPTER, DISTRIBUTED, RANKS, ZERO, Weights, weights_in
from .zero import Flat, read_zero

WRAPPING_KEYS = (*STATE_DICTS, "module")
"""Keys of pickled files that hold a state dict: of training scripts, Lightning, DeepSpeed."""


class AnyCheckpoint(Checkpoint):
    """A checkpoint whose problems are collected.

    Args:
        source: a folder or a file.
        key: the keys that lead to the model in a pickled file, with dots between them; None: it is found.

    Attributes:
        findings: what is wrong with the files.
        kind: how the weights are stored, in words.
        adapter: the content of `adapter_config.json` where the weights are an adapter's; else None.
        extras: what lies next to the weights in a pickled file, where that is plain: settings of training code.
        file: the file, if it is one; then `folder` is the one that it lies in.

    Raises:
        ConversionError: the file does not exist.
    """

    def __init__(self, source: str | PathLike[str], key: str | None = None):
        self.findings: list[Finding] = []
        self.kind = ""
        self.adapter: dict[str, Any] | None = None
        self.extras: dict[str, Any] = {}
        self._key = key
        self._pieces: dict[str, Pieced | Flat] = {}
        self._plain: set[Path] = set()
        path = Path(source)
        if not path.exists():
            raise ConversionError(f"{source}: no such folder or file")
        self.file = None if path.is_dir() else path
        super().__init__(path if self.file is None else path.parent)

    @property
    def _wrappers(self) -> tuple[str, ...]:
        return WRAPPING_KEYS

    def _open(self) -> None:
        self.tensors, self._pieces, self.findings, self._identities = {}, {}, [], {}
        self.config = self._json("config.json", read_config, "config")
        weights = weights_in(self.file or self.folder)
        self.findings += weights.findings
        self.kind = weights.kind
        if weights.kind == ADAPTER:
            self.adapter = self._json("adapter_config.json", read_json, "file")
        try:
            self._read_headers(weights)
        except CheckpointError as error:
            self.findings.append(Finding("file", ERROR, str(error)))
        if not all_plain(self.tensors):
            self.config = with_modelopt(self.config, self._json(FEW_BITS[0], read_json, "config"))
        if weights.files and not self.tensors and not any(each.severity == ERROR for each in self.findings):
            said = "the weights have no tensors"
            self.findings.append(Finding("file", ERROR, said, "save the model again: an empty state dict was saved"))
        if weights.places is not None:
            self._compare_index(weights.places)
        if self.wrapper:
            self.extras = self._extras(weights.files[0], self.wrapper)
            self.findings.append(
                Finding(
                    "key",
                    WARNING,
                    f"the tensors are under the key {shown(self.wrapper)} of a pickled file, where no class looks",
                    "save only them: --mend writes them as safetensors",
                    is_mended=True,
                )
            )

    def _json(self, name: str, read: Callable[[Path], dict[str, Any]], kind: str) -> dict[str, Any]:
        """A JSON file next to the weights; {} if it is missing or damaged, which is a finding of this kind."""
        if not (self.folder / name).exists():
            return {}
        try:
            return read(self.member(name))
        except CheckpointError as error:
            self.findings.append(Finding(kind, ERROR, str(error)))
            return {}

    def _read_headers(self, weights: Weights) -> None:
        if weights.kind == DISTRIBUTED:
            self._take_pieces(read_distributed(weights.files[0].parent))
        elif weights.kind == RANKS and weights.files:
            self._take_pieces(read_rank_files(weights.files))
        elif weights.kind == ZERO and weights.files:
            self._take_pieces(read_zero(weights.files[0].parent))
        for path in [] if self._pieces else weights.files:
            self._note(path)
            try:
                numbers = read_numbers(path) if path.suffix == ".bin" else None
                if numbers is not None:
                    self._plain.add(path)
                    self.extras = {LLAMA2_C.key: numbers[1]}
                infos = self._infos(path) if numbers is None else numbers[0]
            except CheckpointError as error:
                self.findings.append(Finding("file", ERROR, str(error)))
                continue
            for info in infos:
                other = self.tensors.setdefault(info.name, info)
                if other is not info:
                    where = f"{shown(other.file.name)} and in {shown(path.name)}"
                    said = f"{shown(info.name)} is in {where}; the first is read"
                    self.findings.append(Finding("twice", ERROR, said, "remove one of the files", names=(info.name,)))

    def _infos(self, path: Path) -> list[TensorInfo]:
        """The headers of a file; a pickle that the strict reader refuses is read with stand-ins."""
        is_pickled = path.suffix in PICKLED_SUFFIXES
        try:
            if self._key is None or not is_pickled:
                return self._headers(path)
        except CheckpointError:
            if not is_pickled:
                raise
        try:
            found = read_pickled_model(path, self._key)
        except CheckpointError:
            found = None
            if self._key is not None:
                raise
        if found is None:
            return self._headers(path)
        self.findings += found.findings
        self.extras = found.extras
        return found.infos

    def _compare_index(self, places: Mapping[str, str]) -> None:
        """Note where an index contradicts the files that are there."""
        read = {info.file.name for info in self.tensors.values()}
        here = {name: file for name, file in places.items() if file in read}
        problems = self._differences(here)
        if problems and not any(each.kind == "twice" for each in self.findings):
            said = f"the index and the files do not agree:{listed(problems, 3)}"
            fix = "remove the index if another save has left it; --mend writes a new one"
            self.findings.append(Finding("index", WARNING, said, fix, True))

    def _take_pieces(self, pieces: Mapping[str, Pieced | Flat]) -> None:
        self._pieces = dict(pieces)
        self.tensors = {name: each.info for name, each in pieces.items()}
        for path in sorted({file for each in pieces.values() for file in each.files}):
            self._note(path)

    def _extras(self, path: Path, key: str) -> dict[str, Any]:
        """The plain dicts next to the weights in a pickled file, which has been read with success before."""
        loaded = torch.load(path, map_location="meta", weights_only=True, mmap=False)
        if others := others_in(loaded, key):
            said = f"the file has other weights too, under {' and '.join(map(shown, others))}; those under {shown(key)}"
            fix = f"an average of the weights (EMA) is often the better model: --key {others[0]} reads it"
            self.findings.append(Finding("other-weights", WARNING, f"{said} are read", fix, True))
        return {str(name): value for name, value in loaded.items() if name != key and isinstance(value, dict)}

    def _note(self, path: Path) -> None:
        """Remember a file for `check_unchanged`; links may not lead out of the folder."""
        self.member(path.relative_to(self.folder).as_posix())

    def _opened(self, path: Path) -> BinaryIO:
        """See `Checkpoint._opened`; a file of plain numbers has no checksums to compare."""
        if path in self._plain:
            self._verified.add(path)
        return super()._opened(path)

    def read(self, name: str) -> Tensor:
        return self._pieces[name].read() if name in self._pieces else super().read(name)

    def parts(self, name: str) -> Iterator[Tensor]:
        """See `Checkpoint.parts`; a tensor in pieces is read whole."""
        return iter([self.read(name).reshape(-1)]) if name in self._pieces else super().parts(name)


class Changed(Checkpoint):
    """A checkpoint as it would be after some changes, of which nothing is written.

    Args:
        source: the checkpoint.
        groups: what would make its tensors.
        config: its `config.json`.
    """

    def __init__(self, source: AnyCheckpoint, groups: Sequence[Group], config: Mapping[str, Any]):
        self.source, self.config = source, dict(config)
        self.folder, self.weights, self.around = source.folder, source.weights, None
        self._config_file, self.wrapper, self._identities = None, None, {}
        self.groups = {target.name: group for group in groups for target in group.targets}
        self.tensors = {
            name: TensorInfo(name, each.dtype, each.shape, source.folder) for name, each in targets_of(groups).items()
        }

    def read(self, name: str) -> Tensor:
        return dict(self.groups[name].apply(self.source.read))[name]

    def parts(self, name: str) -> Iterator[Tensor]:
        return self.groups[name].parts(name, self.source)

    def check_unchanged(self) -> None:
        self.source.check_unchanged()

    def close(self) -> None:
        self.source.close()
