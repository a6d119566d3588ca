"""Does a converted model compute what the original computes? Both run on the same input; the differences are measured.

One model is in memory at a time. float32 checkpoints are compared in float32. Checkpoints of a smaller dtype are run in
that dtype and, where memory allows, also in float32 on the same (exactly widened) weights, which is the sharp test: in
bfloat16 alone a real fault could hide behind rounding.

B batch, T length, V vocabulary.
"""

import copy
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from .errors import ConversionError

TOLERANCE = 1e-5
"""Allowed difference of float32 logits, as a share of the largest logit (or absolute, if that is below 1)."""
EPSILONS = 4
"""Allowed difference in a smaller dtype, in units of its machine epsilon, as a share of the largest logit."""
SHARP = (torch.float32, torch.float64)
NEW_TOKENS = 8
ROWS, LONGEST = 2, 48


@dataclass(frozen=True)
class Probe:
    """One input: tokens [B, T], mask [B, T] and positions [B, T]."""

    name: str
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor


@dataclass(frozen=True)
class Measured:
    """What one comparison found.

    Attributes:
        dtype: in which both models ran.
        max_difference: largest absolute difference of two logits.
        max_logit: largest absolute logit, to judge the difference by.
        limit: the difference that was allowed.
        positions: how many positions were compared, V logits each.
        same_text: whether the greedy continuations were equal.
        finite: whether the original's logits were; if not, nothing else says anything.
    """

    dtype: str
    max_difference: float
    max_logit: float
    limit: float
    positions: int
    same_text: bool
    finite: bool = True

    @property
    def passed(self) -> bool:
        """Whether the two models agree."""
        return not self.finite or self.max_difference <= self.limit

    def __str__(self) -> str:
        if not self.finite:
            return f"{self.dtype}: the original's logits are not finite, so nothing could be compared"
        text = "the same greedy text" if self.same_text else "different greedy text"
        return (
            f"{self.dtype}: largest difference of {self.positions} x V logits {self.max_difference:.1e} "
            f"(largest logit {self.max_logit:.1f}, allowed {self.limit:.1e}), {text}"
        )


@dataclass
class Parity:
    """Every comparison of a converted model with its original; empty, with a note, if none could be made."""

    measured: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the models agree. Greedy text counts in float32 only: in less, a rounding can decide a word."""
        wrong_text = any(m.finite and not m.same_text and m.dtype in ("float32", "float64") for m in self.measured)
        return all(m.passed for m in self.measured) and not wrong_text

    def __str__(self) -> str:
        return "; ".join([*map(str, self.measured), *self.notes])


def probes(config: PretrainedConfig) -> list[Probe]:
    """Inputs that fit a model: random, structured (a ramp, a repetition), and padded on the left."""
    vocabulary = config.vocab_size
    length = max(2, min(LONGEST, config.max_position_embeddings - NEW_TOKENS))
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(vocabulary, (ROWS, length), generator=generator)
    ramp = torch.arange(length) % vocabulary
    repeated = torch.randint(vocabulary, (3,), generator=generator).repeat(length)[:length]
    full, count = torch.ones(ROWS, length, dtype=torch.long), torch.arange(length).expand(ROWS, length)
    padded = full.clone()
    padded[0, : length // 2] = 0
    positions = (padded.cumsum(-1) - 1).clamp(min=0)
    return [
        Probe("random", random, full, count),
        Probe("structured", torch.stack([ramp, repeated]), full, count),
        Probe("padded", random, padded, positions),
    ]


@torch.no_grad()
def run(model: PreTrainedModel, inputs: list[Probe]) -> tuple[list[Tensor], list[list[int]]]:
    """The float32 logits [positions, V] of each probe's real tokens, and greedy continuations."""
    model.eval()
    model.generation_config = GenerationConfig()
    logits, texts = [], []
    for probe in inputs:
        tensors = {"input_ids": probe.input_ids, "attention_mask": probe.attention_mask}
        output = model(**tensors, position_ids=probe.position_ids).logits
        logits.append(output[probe.attention_mask.bool()].float())
        continued: Any = model.generate(**tensors, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        texts.append(continued[:, probe.input_ids.shape[1] :].flatten().tolist())
    return logits, texts


def compare(dtype: torch.dtype, original: Any, converted: Any) -> Measured:
    """Compare what `run` gave for two models."""
    largest = difference = 0.0
    finite = True
    for ours, theirs in zip(converted[0], original[0], strict=True):
        if not torch.isfinite(theirs).all():
            finite = False
            continue
        largest = max(largest, theirs.abs().max().item())
        gap = (ours - theirs).abs().max().item()
        difference = max(difference, gap if gap == gap else float("inf"))
    share = TOLERANCE if dtype in SHARP else EPSILONS * torch.finfo(dtype).eps
    positions = sum(tensor.shape[0] for tensor in original[0])
    name = str(dtype).removeprefix("torch.")
    return Measured(
        name, difference, largest, share * max(1.0, largest), positions, original[1] == converted[1], finite
    )


def verify(
    original: Callable[[torch.dtype], PreTrainedModel],
    converted: Callable[[torch.dtype], PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    parameters: int,
    step: Callable[[str], None] = lambda text: None,
) -> Parity:
    """Run both models and compare.

    Args:
        original: loads the original in a dtype.
        converted: loads the converted model in a dtype.
        config: a config of either, for the sizes of the input.
        dtype: the dtype of the converted checkpoint.
        parameters: how many parameters each has.
        step: told what is being done.

    Raises:
        ConversionError: the models disagree.
    """
    parity = Parity()
    wanted = [dtype] if dtype in SHARP else [dtype, torch.float32]
    if dtype.itemsize == 1:  # float8 is for storing, not for computing
        wanted = [torch.float32]
    possible = [d for d in wanted if _fits(parameters, d)]
    for skipped in wanted:
        if skipped not in possible:
            name = str(skipped).removeprefix("torch.")
            need = parameters * skipped.itemsize / 2**30
            parity.notes.append(f"not compared in {name}: one model needs {need:.1f} GiB, more than is free here")
    inputs = probes(config)
    results: list[list[Any]] = []
    for name, load in (("original", original), ("converted", converted)):
        results.append([])
        for kind in possible:
            step(f"running the {name} model in {str(kind).removeprefix('torch.')}")
            with quiet():
                model = load(kind)
                results[-1].append(run(model, inputs))
            del model
            if parameters > 10_000_000:  # of a smaller one there may be two
                gc.collect()
    parity.measured = [compare(kind, *pair) for kind, *pair in zip(possible, *results, strict=True)]
    if not parity.passed:
        raise ConversionError(f"the converted model does not compute what the original computes: {parity}")
    return parity


def _fits(parameters: int, dtype: torch.dtype) -> bool:
    """Whether one model fits into the memory that is free, with a quarter and 256 MiB for all else."""
    free = available_memory()
    return free is None or parameters * dtype.itemsize * 1.25 + (256 << 20) < free


def available_memory() -> int | None:
    """Bytes that this process may still take: what the system has free and its own limit; None where none tells."""
    bounds = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            entries = dict(line.split(":", 1) for line in file)
        bounds.append(int(entries["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:  # a container's own limit
        limit_text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit_text != "max":
            bounds.append(int(limit_text) - int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            with open("/proc/self/statm", encoding="ascii") as file:
                bounds.append(limit - int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError, ValueError):
        pass
    return min(bounds) if bounds else None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars, notes and warnings of the libraries."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_model(
    model_class: type[PreTrainedModel], config: PretrainedConfig, folder: Path, dtype: torch.dtype
) -> PreTrainedModel:
    """A model from a folder: its class and config are given, so that nothing in the folder names any code."""
    return model_class.from_pretrained(
        folder,
        config=copy.deepcopy(config),
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=False,
        local_files_only=True,
    )
