"""Check that a converted model computes what the original computes, by running both on the same input.

Logits are compared (hidden states for a model without a head), and greedy text if the model generates.

Only one model is in memory at a time. float32 checkpoints are compared in float32. Checkpoints of a smaller dtype run
briefly in that dtype and, if memory allows, in float32 on the same weights, widened exactly. The second run is the
sharp one: with only bfloat16, rounding could hide a real fault.

B batch, T length, S length of an encoder's states, C their width, V vocabulary.
"""

import copy
import gc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from blockformer.inputs import inputs_of
from blockformer.model.positions import positions_from_mask

from .errors import ConversionError
from .memory import available_memory
from .progress import Passes, Progress, silent
from .quiet import quiet

TOLERANCE = 1e-5
"""Allowed float32 difference relative to the largest output (absolute if that is below 1)."""
EPSILONS = 4
"""Allowed difference in a smaller dtype, in units of its machine epsilon, as a share of the largest output."""
SHARP = (torch.float32, torch.float64)
NEW_TOKENS = 8
TEXT, LOADING = 2, 1
"""How many passes over an input take about as long as writing those tokens and as loading a model."""
ROWS, LONGEST = 2, 48
PER_TOKEN = ("logits", "prediction_logits", "start_logits", "end_logits", "last_hidden_state")
PER_ROW = ("logits", "seq_relationship_logits", "pooler_output")
"""The outputs compared: per token [B, T, ...], padding left out, and per row."""
OTHER_NAMES = {"seq_relationship_logits": "sop_logits"}
"""Our outputs that an official class calls otherwise (ALBERT)."""


@dataclass(frozen=True)
class Probe:
    """One input: tokens and mask, each [B, T], and positions [B, T] for a model that takes them.

    Attributes:
        others: what else the model takes, by argument: see `inputs_of`.
    """

    name: str
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def target(self) -> Tensor | None:
        """What the decoder of an encoder-decoder reads, [B, T]."""
        return self.others.get("decoder_input_ids")


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
    """

    dtype: str
    max_difference: float
    max_logit: float
    limit: float
    positions: int
    same_text: bool | None
    finite: bool = True
    outputs: str = "logits"

    @property
    def passed(self) -> bool:
        """Whether the two models were seen to agree; False where the outputs were not finite."""
        return self.finite and self.max_difference <= self.limit

    def __str__(self) -> str:
        if not self.finite:
            return f"{self.dtype}: the original's outputs are not finite, so nothing could be compared"
        texts = {None: "", True: ", the same greedy text", False: ", different greedy text"}
        return (
            f"{self.dtype}: largest difference of {self.outputs} at {self.positions} places {self.max_difference:.1e} "
            f"(largest value {self.max_logit:.1f}, allowed {self.limit:.1e}){texts[self.same_text]}"
        )


@dataclass
class Parity:
    """All comparisons of a converted model with its original; empty, with a note, if none was possible.

    A comparison without finite outputs proves nothing: such a conversion is not verified, and does not fail either.
    """

    measured: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the models were compared, and agree wherever the original's outputs are finite."""
        return any(m.finite for m in self.measured) and not self.disagrees

    @property
    def disagrees(self) -> bool:
        """Whether a comparison failed. Text counts in float32 only: in a smaller dtype, rounding can change a token."""
        finite = [m for m in self.measured if m.finite]
        wrong_text = any(m.same_text is False and m.dtype in ("float32", "float64") for m in finite)
        return wrong_text or not all(m.passed for m in finite)

    @property
    def why_not_verified(self) -> str:
        """Why nothing is known of how the models agree; "" where they were compared."""
        return "" if any(m.finite for m in self.measured) else str(self) or "nothing was compared"

    def __str__(self) -> str:
        return "; ".join([*map(str, self.measured), *self.notes])


def probes(config: PretrainedConfig, counts_padding: bool = False) -> list[Probe]:
    """Inputs that fit one of our models: random, structured (a ramp, a repetition), and padded on the left.

    What else the model takes is random (see `inputs_of`); encoders also get right padding.
    Some official classes count padding among the positions and take no position ids: encoder-decoders with embedded
    positions, and families with `counts_padding`. They get right padding only.

    No input holds the padding token: some official classes (M2M-100, RoBERTa) count positions from `ids != pad`.
    """
    vocabulary = config.vocab_size
    length = max(2, min(LONGEST, config.max_position_embeddings - NEW_TOKENS))
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(vocabulary, (ROWS, length), generator=generator)
    ramp = torch.arange(length) % vocabulary
    repeated = torch.randint(vocabulary, (3,), generator=generator).repeat(length)[:length]
    full, count = torch.ones(ROWS, length, dtype=torch.long), torch.arange(length).expand(ROWS, length)
    padded = full.clone()
    padded[0, : length // 2] = 0
    positions = positions_from_mask(padded)
    _, *rest = inputs_of(config)
    others = {each.name: each.example(ROWS, 7 if each.kind == "states" else length, generator) for each in rest}
    pad = (config.pad_token_id,)
    others |= {each.name: _without(others[each.name], pad) for each in rest if each.kind == "tokens"}
    random = _without(random, pad)
    inputs = [
        Probe("random", random, full, count, others),
        Probe("structured", _without(torch.stack([ramp, repeated]), pad), full, count, others),
    ]
    relative = getattr(config, "position_type", "") == "relative_bias"
    if relative or not (counts_padding or getattr(config, "is_encoder_decoder", False)):
        inputs.append(Probe("padded", random, padded, positions, others))
    if counts_padding or not getattr(config, "is_decoder", True):
        inputs.append(Probe("padded on the right", random, padded.flip(-1), count, others))
    if relative or getattr(config, "is_encoder_decoder", False):
        return [_as_source(probe, config.eos_token_id, config.pad_token_id) for probe in inputs]
    return [replace(probe, position_ids=None) for probe in inputs] if counts_padding else inputs


def _without(ids: Tensor, tokens: Collection[Any]) -> Tensor:
    """The ids with the smallest other token in place of these tokens."""
    other = next(token for token in range(len(tokens) + 1) if token not in tokens)
    for token in tokens:
        ids = ids if token is None else ids.masked_fill(ids == token, other)
    return ids


def _as_source(probe: Probe, end: Any, pad: Any) -> Probe:
    """The probe without positions, each row ending in its only end token, as some heads require."""
    input_ids = probe.input_ids
    if isinstance(end, int):
        last = (torch.arange(input_ids.shape[1]) * probe.attention_mask).argmax(-1, keepdim=True)
        input_ids = _without(input_ids, (end, pad)).scatter(1, last, end)
    return replace(probe, input_ids=input_ids, position_ids=None)


def writes_from(model: PreTrainedModel, probe: Probe) -> bool:
    """Whether a model is to write a text from an input, which one that sees all of a text at once cannot."""
    reads_only = getattr(model.config, "bidirectional", False) or getattr(model.config, "is_causal", True) is False
    is_asked = model.can_generate() and not reads_only
    return is_asked and "encoder_hidden_states" not in probe.others and probe.name != "random"


@torch.no_grad()
def run(
    model: PreTrainedModel,
    inputs: list[Probe],
    shift: int = 0,
    writes_text: bool = True,
    passes: Passes | None = None,
) -> tuple[list[Tensor], list[list[int]], str]:
    """Run a model on the inputs.

    Args:
        model: the model.
        inputs: the inputs.
        shift: added to their position ids.
        writes_text: whether to generate from them too, if the model can.
        passes: counts what is done.

    Returns:
        float32 outputs [places, ...] at real tokens and per row; greedy continuations; the names of the outputs.
    """
    model.eval()
    passes = passes or Passes()
    if "ForSequenceClassification" in type(model).__name__ and not model.config.is_encoder_decoder:
        # Official decoders need it for a batch, and take a row's last other token; no probe of theirs ends in padding.
        model.config.pad_token_id = -1
    outputs: list[Tensor] = []
    texts: list[list[int]] = []
    names: list[str] = []
    for probe in inputs:
        with passes.counted(model):
            output = model(**_arguments(model, probe, shift))
        values, names = _compared(output, probe)
        outputs += values
        if writes_text and writes_from(model, probe):
            with passes.counted(model, TEXT, calls=NEW_TOKENS):
                texts.append(_written_text(model, probe))
    return outputs, texts, " and ".join(names)


def _arguments(model: PreTrainedModel, probe: Probe, shift: int) -> dict[str, Tensor | bool]:
    """What `forward` is called with."""
    arguments: dict[str, Any] = {"input_ids": probe.input_ids, "attention_mask": probe.attention_mask, **probe.others}
    if probe.position_ids is not None:
        arguments["position_ids"] = probe.position_ids + shift
    if "MultipleChoice" in type(model).__name__:
        if not shift:  # one official class takes none in this shape; rows that begin with padding are not compared
            arguments.pop("position_ids", None)
        arguments.pop("task_type_ids", None)  # which another one takes as they are
        arguments = {name: tensor[None] for name, tensor in arguments.items()}
    if (states := arguments.get("encoder_hidden_states")) is not None:
        # Some official models get a cache of too few layers where the decoder has more than the encoder.
        arguments |= {"encoder_hidden_states": states.to(model.dtype), "use_cache": False}
    return arguments


def _compared(output: Any, probe: Probe) -> tuple[list[Tensor], list[str]]:
    """Of the output of a model what is compared, in float32, [places, ...], and the names."""
    target = probe.target
    mask = (probe.attention_mask if target is None else torch.ones_like(target)).bool()
    compared, names = [], []
    for name in dict.fromkeys(PER_TOKEN + PER_ROW):
        values = output.get(name, output.get(OTHER_NAMES.get(name)))
        if values is None:
            continue
        names.append(name)
        if name in PER_TOKEN and values.shape[:2] == mask.shape:
            compared.append(values[mask].float())
        else:  # a row's summary is its first token's, which must be a real one
            compared.append(values.reshape(len(mask), -1)[mask[:, 0]].float())
    return compared, names


def _written_text(model: PreTrainedModel, probe: Probe) -> list[int]:
    """The tokens that a model writes after an input."""
    pad = getattr(model.config, "pad_token_id", None)  # some official classes leave it out
    pad = pad if isinstance(pad, int) and pad >= 0 else None
    model.generation_config = GenerationConfig(suppress_tokens=None if pad is None else [pad])
    target = probe.target
    # Without a cache, for the same reason as in `_arguments`.
    own = {} if target is None else {"decoder_start_token_id": int(target[0, 0]), "use_cache": False}
    continued: Any = model.generate(
        input_ids=probe.input_ids,
        attention_mask=probe.attention_mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        **own,
    )
    return continued[:, probe.input_ids.shape[1] if target is None else 1 :].flatten().tolist()


def compare(dtype: torch.dtype, original: Any, converted: Any, official: tuple[Any, Any] | None = None) -> Measured:
    """Compare the results of `run` for two models.

    In 16 bits both round, in an order of their own: they may be twice as far apart as the official model is from its
    own results in float32, in both directions of a conversion.

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
    name = str(dtype).removeprefix("torch.")
    same_text = original[1] == converted[1] if original[1] else None
    limit = share * max(1.0, largest)
    if official is not None:
        rough, sharp = official
        gaps = [(a - b).abs().max().item() for a, b in zip(rough[0], sharp[0], strict=False)]
        limit = max(limit, *(2 * gap for gap in gaps if gap == gap))
    return Measured(name, difference, largest, limit, positions, same_text, finite, original[2])


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
    possible = [d for d in wanted if _fits(parameters, d)]
    for skipped in wanted:
        if skipped not in possible:
            name = str(skipped).removeprefix("torch.")
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
            step = f"comparing {count}: {name} model, {str(kind).removeprefix('torch.')}"
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


def _fits(parameters: int, dtype: torch.dtype) -> bool:
    """Whether one model fits into free memory, with a quarter more plus 256 MiB for everything else."""
    return parameters * dtype.itemsize * 1.25 + (256 << 20) < available_memory()


def attention_of(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str:
    """The attention implementation that computes what the config says: "sdpa", where that does."""
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
