"""The one way to write a repo: its weights and what is around them, next to its place; checked, and put there at once.

`convert` in both directions, `export`, changes of shape, `export_model` and `upgrade` all write by it. They differ in
where the weights come from (`Weights`) and in the files that they `fill` in.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from ..files.atomic import States
from ..files.errors import ConversionError, listed, memory_errors, shown
from ..files.finite import nonfinite
from ..files.new_repo import RepoOptions, new_repo
from ..files.safetensors_io import torch_name
from ..files.sizes import parse_size
from ..files.writer import Planned
from . import signing


class Weights(Protocol):
    """The weights of a new repo, and what they are made of.

    Attributes:
        name: what an error calls the source.
        files: paths that are read: the repo must lie apart from them.
    """

    name: str
    files: list[Path]

    def planned(self) -> Iterable[Planned]:
        """The tensors that are written."""

    def write(self, folder: Path, options: RepoOptions) -> Mapping[str, int]:
        """Write them. Returns name -> how many elements are NaN or infinite."""

    def check_unchanged(self) -> None:
        """Raise if a file that was read has changed since."""


@dataclass
class RepoReport:
    """What was written.

    Attributes:
        source: what was read.
        target: the folder created.
        tensors: number of tensors written.
        nbytes: their size in bytes.
        dtypes: their dtypes, largest share first.
        seconds: wall-clock time.
        notes: findings the user should know of.
        has_tokenizer: whether the source has a tokenizer (an article's weight file needs none).
        left_out: reason -> names of files of the source that were not carried.
    """

    source: str
    target: Path
    tensors: int = 0
    nbytes: int = 0
    dtypes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    has_tokenizer: bool = True
    left_out: dict[str, list[str]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic, repr=False)


def write_repo(
    weights: Weights,
    options: RepoOptions,
    fill: Callable[[Path], None],
    report: RepoReport,
    renewed: States | None = None,
) -> None:
    """Write a repo. It appears whole or not at all.

    Args:
        weights: what is written first.
        options: how it is written.
        fill: writes all other files into the folder that it is called with.
        report: says which folder is created; is completed: what was written, what is wrong with the values, how long it
            took.
        renewed: see `atomic_folder`.

    Raises:
        ConversionError: the target cannot be used, the repo is not whole, or what was read has changed. Nothing is left
            behind then.
    """
    planned = list(weights.planned())
    sizes = bytes_by_dtype(planned)
    report.tensors, report.nbytes = len(planned), sum(sizes.values())
    report.dtypes = [torch_name(dtype) for dtype in sizes]
    place = new_repo(report.target, options, weights.files, weights.check_unchanged, renewed)
    with memory_errors(), place as folder:
        counts = weights.write(folder, options)
        report.notes += note_on_values(weights.name, planned, counts, options.strict_finite)
        fill(folder)
        options.progress("putting the folder into place", 0, 0)
        if options.sign is not None:
            signing.sign(folder, options.sign)
    report.seconds = time.monotonic() - report.began


def bytes_by_dtype(planned: Iterable[Planned]) -> dict[torch.dtype, int]:
    """Dtype -> bytes of what is written, the largest share first."""
    sizes: dict[torch.dtype, int] = {}
    for _, dtype, shape in planned:
        sizes[dtype] = sizes.get(dtype, 0) + torch.Size(shape).numel() * dtype.itemsize
    return dict(sorted(sizes.items(), key=lambda entry: -entry[1]))


def note_on_values(
    source: str, planned: Iterable[Planned], counts: Mapping[str, int], strict_finite: bool = False
) -> list[str]:
    """A note on NaN and infinite weights, if there are some.

    Args:
        source: what the error names.
        planned: what was written.
        counts: name -> how many of its elements are NaN or infinite.
        strict_finite: refuse them.

    Raises:
        ConversionError: there are some, and they are refused.
    """
    bad = [
        f"{shown(name)}: {counts[name]} of {torch.Size(shape).numel()} in {torch_name(dtype)}"
        for name, dtype, shape in planned
        if counts.get(name)
    ]
    if bad and strict_finite:
        raise ConversionError(f"{source}: NaN or infinite values:{listed(bad)}")
    return [f"NaN or infinite values (kept as they are):{listed(bad)}"] if bad else []


class ModelWeights:
    """The weights of a model in memory, written by its own `save_pretrained`: on any device, quantized or offloaded.

    Its config, generation settings and code are written with them.

    Args:
        model: the model.
        name: what an error calls it.
        files: paths that it was read from.
        check_unchanged: raises if one of them has changed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str = "",
        files: Sequence[Path] = (),
        check_unchanged: Callable[[], None] = lambda: None,
    ):
        self.model, self.name, self.files = model, name or type(model).__name__, list(files)
        self.check_unchanged = check_unchanged

    def planned(self) -> Iterable[Planned]:
        """See `Weights.planned`. Tied weights are written once."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        tensors = ((name, each) for name, each in self.model.state_dict().items() if name not in tied)
        return [(name, each.dtype, each.shape) for name, each in tensors if isinstance(each, torch.Tensor)]

    def write(self, folder: Path, options: RepoOptions) -> Mapping[str, int]:
        options.progress("writing weights", 0, 0)
        self.model.save_pretrained(folder, max_shard_size=parse_size(options.max_shard_size))
        if getattr(self.model.config, "quantization_config", None) is not None:
            return {}  # tensors of the quantizing library's own kinds
        return {name: nonfinite(each) for name, each in self.model.state_dict().items() if not each.is_meta}
