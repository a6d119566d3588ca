"""Check that a converted model computes what the original computes, by running both on the same input.

Logits are compared (hidden states for a model without a head), and greedy text if the model generates.

Only one model is in memory at a time. float32 checkpoints are compared in float32. Checkpoints of a smaller dtype run
briefly in that dtype and, if memory allows, in float32 on the same weights, widened exactly. The second run is the
sharp one: with only bfloat16, rounding could hide a real fault.
"""

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.files.errors import ConversionError
from blockformer.files.progress import Progress, silent
from blockformer.files.quiet import quiet
from blockformer.files.safetensors_io import torch_name

from .memory import available_memory
from .probes import TEXT, probes, run, writes_from
from .progress import Passes

TOLERANCE = 1e-5
"""Allowed float32 difference relative to the largest output (absolute if that is below 1)."""
EPSILONS = 4
"""Allowed difference in a smaller dtype, in units of its machine epsilon, as a share of the largest output."""
TOGETHER = 1.25
"""How much further than the official model ours may be from float32's results in a smaller dtype, in the root of the
mean square of all outputs; by hand."""
SHARP = (torch.float32, torch.float64)
LOADING = 1
"""How many passes over an input take about as long as loading a model."""


@dataclass(frozen=True)
class Measured:
    """The result of one comparison.

    Attributes:
        dtype: the dtype both models ran in.
        max_difference: largest absolute difference of two outputs.
        max_logit: largest absolute output, which puts the difference in proportion.
        limit: the largest difference allowed.
        positions: how many tokens and rows were compared.
        same_text: whether the greedy continuations were equal; None if there were none.
        finite: whether the original's outputs were finite; if not, the other figures mean nothing.
        outputs: names of the outputs compared.
        unit: what is counted.
    """

    dtype: str
    max_difference: float
    max_logit: float
    limit: float
    positions: int
    same_text: bool | None
    finite: bool = True
    outputs: str = "logits"
    unit: str = "places"

    @property
    def proves(self) -> bool:
        """Whether the outputs show anything: they are finite, and not all zero on both sides."""
        return self.finite and max(self.max_logit, self.max_difference) > 0

    @property
    def passed(self) -> bool:
        """Whether the two models were seen to agree; False where the outputs show nothing."""
        return self.proves and self.max_difference <= self.limit

    def __str__(self) -> str:
        if not self.finite:
            return f"{self.dtype}: the original's outputs are not finite, so nothing could be compared"
        if not self.proves:
            why = "most likely its weights were saved without gathering, or downloaded in part"
            return f"{self.dtype}: the original's outputs are all zero, so nothing could be compared; {why}"
        largest = f"{self.max_logit:.1f}" if self.max_logit >= 0.1 else f"{self.max_logit:.1e}"
        texts = {None: "", True: ", the same greedy text", False: ", different greedy text"}
        return (
            f"{self.dtype}: largest difference of {self.outputs} at {self.positions} {self.unit} "
            f"{self.max_difference:.1e} (largest value {largest}, allowed {self.limit:.1e})"
            f"{texts[self.same_text]}"
        )


@dataclass
class Parity:
    """All comparisons of a converted model with its original; empty, with a note, if none was possible.

    A comparison whose outputs are not finite, or all zero, proves nothing: such a conversion is not verified, and does
    not fail either.
    """

    measured: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the models were compared, and agree wherever the original's outputs show anything."""
        return any(m.proves for m in self.measured) and not self.disagrees

    @property
    def disagrees(self) -> bool:
        """Whether a comparison failed. Text counts in float32 only: in a smaller dtype, rounding can change a token."""
        finite = [m for m in self.measured if m.proves]
        wrong_text = any(m.same_text is False and m.dtype in ("float32", "float64") for m in finite)
        return wrong_text or not all(m.passed for m in finite)

    @property
    def why_not_verified(self) -> str:
        """Why nothing is known of how the models agree; "" where they were compared."""
        return "" if any(m.proves for m in self.measured) else str(self) or "nothing was compared"

    def __str__(self) -> str:
        return "; ".join([*map(str, self.measured), *self.notes])


def compare(dtype: torch.dtype, original: Any, converted: Any, official: tuple[Any, Any] | None = None) -> Measured:
    """Compare the results of `run` for two models.

    In 16 bits both round, each in its own order: they may be twice as far apart as the official model is from its
    own results in float32, in both directions of a conversion. One place may be further off by chance. It is where, all
    outputs taken together, ours is hardly further from the results in float32 than the official model.

    Args:
        dtype: the dtype they ran in.
        original, converted: their results.
        official: the results of the official one in this dtype and, of the same inputs and perhaps more, in float32.
    """
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
    name = torch_name(dtype)
    same_text = original[1] == converted[1] if original[1] else None
    limit = share * max(1.0, largest)
    if official is not None:
        rough, sharp = official
        theirs, ours = (_errors(each, sharp) for each in (rough, converted if rough is original else original))
        limit = max(limit, 2 * theirs.max().item())
        if ours.square().mean() <= TOGETHER**2 * theirs.square().mean():
            limit = max(limit, theirs.max().item() + ours.max().item())
    return Measured(name, difference, largest, limit, positions, same_text, finite, original[2])


def _errors(rough: Any, sharp: Any) -> torch.Tensor:
    """How far results are from sharper ones of the same inputs and perhaps more, wherever both are finite."""
    gaps = [(one - other).abs().flatten() for one, other in zip(rough[0], sharp[0], strict=False)]
    return torch.cat([torch.zeros(1), *(gap[gap.isfinite()] for gap in gaps)])


def verify(
    original: Callable[[torch.dtype], PreTrainedModel],
    converted: Callable[[torch.dtype], PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    parameters: int,
    report_progress: Progress = silent,
    shifts: tuple[int, int] = (0, 0),
    counts_padding: bool = False,
    quick: bool = False,
    from_ours: bool = False,
) -> Parity:
    """Run both models and compare.

    Args:
        original: loads the original in a dtype.
        converted: loads the converted model in a dtype.
        config: the config of either model, for the input sizes.
        dtype: the converted checkpoint's.
        parameters: parameter count of each model.
        report_progress: receives progress reports.
        shifts: added to the position ids of the original and of the converted model; some families do not count from 0.
        counts_padding: see `probes`.
        quick: run one text in one dtype, and write none.
        from_ours: whether the original is ours, and the converted model the official one.

    Raises:
        ConversionError: the models disagree.
    """
    parity = Parity()
    wanted = [dtype] if dtype in SHARP else [dtype, torch.float32]
    routes = bool(getattr(config, "num_experts", 0))
    if dtype.itemsize == 1 or (routes and dtype not in SHARP):
        # float8 is for storing, not for computing; and with experts, a rounding may choose another one for a token.
        wanted = [torch.float32]
    wanted = wanted[-1:] if quick else wanted
    possible = [d for d in wanted if fits(parameters, d)]
    for skipped in wanted:
        if skipped not in possible:
            name = torch_name(skipped)
            need = parameters * skipped.itemsize / 2**30
            parity.notes.append(f"not compared in {name}: one model needs {need:.1f} GiB, more than is free here")
    texts = probes(config, counts_padding)
    inputs = {
        kind: texts[:1] if quick or (kind not in SHARP and any(other in SHARP for other in possible)) else texts
        for kind in possible
    }
    results: list[list[Any]] = []
    passes = Passes(report_progress)
    for name, load, shift in (("original", original, shifts[0]), ("converted", converted, shifts[1])):
        results.append([])
        for kind in possible:
            count = f"{len(possible) * (len(results) - 1) + len(results[-1]) + 1} of {2 * len(possible)}"
            step = f"comparing {count}: {name} model, {torch_name(kind)}"
            passes.begin(step)
            with quiet():
                model = load(kind)
                if passes.total:
                    passes.reach(passes.done + LOADING)
                else:
                    written = 0 if any(shifts) else TEXT
                    work = [1 + written * writes_from(model, probe) for kind in possible for probe in inputs[kind]]
                    passes.total = 2 * sum(work) + (2 * len(possible) - 1) * LOADING
                    passes.begin(step)
                results[-1].append(run(model, inputs[kind], shift, not any(shifts), passes))
            del model
            if parameters > 10_000_000:  # of a smaller one there may be two
                gc.collect()
    officials = results[1 if from_ours else 0]
    exact = officials[-1] if possible and possible[-1] in SHARP else None  # of the same inputs, and of more
    parity.measured = [
        compare(kind, before, after, None if kind in SHARP or exact is None else (official, exact))
        for kind, before, after, official in zip(possible, *results, officials, strict=True)
    ]
    if parity.disagrees:
        raise ConversionError(f"the converted model does not compute what the original computes: {parity}")
    return parity


def fits(parameters: int, dtype: torch.dtype) -> bool:
    """Whether one model fits into free memory, with a quarter more plus 256 MiB for everything else."""
    return parameters * dtype.itemsize * 1.25 + (256 << 20) < available_memory()


def attention_of(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str:
    """The attention implementation that follows the config: "sdpa", where it can."""
    parts = (config, getattr(config, "encoder", None), getattr(config, "decoder", None))  # T5Gemma's are configs
    # which "sdpa" ignores in older releases
    capped = any(getattr(part, "attn_logit_softcapping", None) is not None for part in parts)
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) and not capped else "eager"


def load_model(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    arguments: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a model from a folder. Class and config are given, so nothing in the folder can name code to run.

    `arguments` are passed to the class besides its config.
    """
    return model_class.from_pretrained(
        folder,
        config=copy.deepcopy(config),
        dtype=dtype,
        attn_implementation=attention_of(model_class, config),
        trust_remote_code=False,
        local_files_only=True,
        **(arguments or {}),
    )
