"""Findings about the numbers in a checkpoint: dtypes, NaN, zeros, weights that nobody trained or nobody changed."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
import transformers

from blockformer.conversion.families.names import HEAD_ONLY
from blockformer.conversion.rules.ties import are_same
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import listed, shown
from blockformer.files.progress import Progress
from blockformer.files.quantized import EIGHT_BITS, PLAIN, quantized_entries
from blockformer.files.safetensors_io import TensorInfo, torch_name

from .finding import ERROR, NOTE, WARNING, Finding, are, counted
from .layouts import Layouts
from .values import Values, values_of

KEPT_WIDE = (
    "e_score_correction_bias",
    ".expert_bias",
    "inv_freq",
    "A_log",
    "logit_scale",
    "masked_bias",
    "gate.wg.weight",
)
"""Ends of names of tensors that many models keep in float32."""


def kept_wide(layouts: Layouts | None) -> set[str]:
    """Published names of the tensors that the official class keeps in float32 when it is loaded in 16 bits."""
    if layouts is None or layouts.head is None:
        return set()
    official = getattr(transformers, layouts.head, None)
    lists = (getattr(official, f"_keep_in_fp32_modules{end}", None) for end in ("", "_strict"))
    parts = {part for each in lists for part in each or ()}

    def is_kept(name: str) -> bool:
        return any(f".{part}." in f".{name}." for part in parts)

    return {name for name, others in layouts.names_in_class.items() if any(map(is_kept, others))}


def of_dtypes(tensors: Mapping[str, TensorInfo], entries: Mapping[str, Any], kept: Collection[str]) -> list[Finding]:
    """Where dtypes are mixed, or `config.json` says another one.

    Args:
        tensors: name -> header.
        entries: of `config.json`.
        kept: see `kept_wide`.
    """
    if quantized_entries(entries):
        return []

    def may_differ(name: str, dtype: torch.dtype) -> bool:
        return name.endswith(KEPT_WIDE) or (name in kept and dtype is torch.float32)

    plain = {name: info.dtype for name, info in tensors.items() if info.dtype in PLAIN}
    plain = {name: dtype for name, dtype in plain.items() if not may_differ(name, dtype)} or plain
    counts = Counter(plain.values()).most_common()
    findings = []
    if counts[1:]:
        kinds = ", ".join(f"{number} {torch_name(kind)}" for kind, number in counts)
        few = next(name for name, kind in plain.items() if kind is counts[-1][0])
        said = f"the dtypes of tensors are mixed: {kinds} ({shown(few)})"
        findings.append(
            Finding("dtypes", WARNING, said, "--dtype casts all to one, if that is not meant", names=(few,))
        )
    eight = [name for name, info in tensors.items() if info.dtype in EIGHT_BITS and info.dtype.is_floating_point]
    if eight:
        kind = torch_name(tensors[eight[0]].dtype)
        said = f"{counted(len(eight), 'weight')} {are(eight)} {kind} without a scale ({shown(eight[0])})"
        fix = "a cast to 8 bits rounds every number to 2 or 3 binary digits: take the weights from before it"
        findings.append(Finding("dtypes", WARNING, said, fix, names=tuple(eight[:3])))
    said_dtype = entries.get("dtype") or entries.get("torch_dtype")
    most = torch_name(counts[0][0]) if counts else None
    if said_dtype is not None and most is not None and said_dtype != most:
        text = f"config.json says {said_dtype}, and most weights are {most}: transformers loads them as {said_dtype}"
        fix = f"write the dtype that is meant, --set dtype={most}, or cast the weights, --dtype {said_dtype}"
        findings.append(Finding("dtypes", WARNING, text, fix))
    return findings


def of_ties(written: Checkpoint, layouts: Layouts) -> list[Finding]:
    """Whether tied tensors are stored twice, and are equal."""
    pairs = [pair for pair in layouts.tied.items() if {*pair} <= {*written.tensors}]
    findings = []
    for name, source in pairs:
        if are_same(written.parts(name), written.parts(source)):
            said = f"{shown(name)} and {shown(source)} are tied and stored twice; they are equal"
            findings.append(Finding("tied", NOTE, said, names=(name, source)))
        else:
            said = f"{shown(name)} and {shown(source)} are tied by config.json, and they differ"
            fix = f"keep one, --drop {name} or --drop {source}; or both, --set tie_word_embeddings=false"
            findings.append(Finding("tied", ERROR, said, fix, names=(name, source)))
    if layouts.variant is not None and HEAD_ONLY in layouts.variant.traits:
        said = "the head is stored in place of the embeddings that it is tied to"
        findings.append(Finding("tied", NOTE, said, "transformers reads either"))
    return findings


def of_numbers(
    checkpoint: Checkpoint,
    other: Checkpoint | None,
    title: str,
    progress: Progress,
    unread: Collection[str],
) -> list[Finding]:
    """What the numbers of a checkpoint say, compared with another checkpoint if there is one.

    Args:
        checkpoint, other: the two.
        title: of the other.
        progress: receives progress reports.
        unread: names of tensors that the model does without, such as the pooler of a masked language model, or the
            value of masked scores, which is infinite in 16 bits.
    """
    theirs = {} if other is None else other.tensors
    comparable = [
        name
        for name, info in checkpoint.tensors.items()
        if name in theirs and (theirs[name].dtype, theirs[name].shape) == (info.dtype, info.shape)
    ]
    parts = None if other is None else other.parts
    values = values_of(checkpoint.tensors, checkpoint.parts, parts, comparable, progress)
    infos = checkpoint.tensors
    return [
        *_misread(values, infos),
        *_broken(values, infos, unread),
        *_untrained(values, unread),
        *_unchanged(values, title),
    ]


def _misread(values: Mapping[str, Values], infos: Mapping[str, TensorInfo]) -> list[Finding]:
    judged = [name for name, each in values.items() if each.is_misread is not None]
    wrong = [name for name in judged if values[name].is_misread]
    if not wrong or 2 * len(wrong) < len(judged):
        return []
    is_half = infos[wrong[0]].dtype is torch.float16
    here, there = ("float16", "bfloat16") if is_half else ("bfloat16", "float16")
    said = f"{len(wrong)} of {len(judged)} matrices look like {there} whose bits were read as {here}"
    fix = f"save again with a cast, .to(torch.{here}); the bits that are there are tensor.view(torch.{there})"
    return [Finding("misread", ERROR, said, fix, names=tuple(wrong))]


def _broken(values: Mapping[str, Values], infos: Mapping[str, TensorInfo], unread: Collection[str]) -> list[Finding]:
    findings = []
    read = {name: each for name, each in values.items() if name not in unread}
    if bad := [name for name, each in read.items() if each.nonfinite]:
        said = f"NaN or infinite numbers in {counted(len(bad), 'tensor')}:{listed(map(shown, bad), 6)}"
        fix = "take an earlier checkpoint: training diverged, or the file was cast to a dtype with too small a range"
        findings.append(Finding("nonfinite", ERROR, said, fix, names=tuple(bad)))
    # A single row is not a matrix: BART's final_logits_bias, [1, V], is zero in most checkpoints.
    zero = [name for name, each in read.items() if each.constant == 0 and sum(n > 1 for n in infos[name].shape) > 1]
    if zero:
        said = f"{counted(len(zero), 'matrix', 'matrices')} {are(zero)} all zero:{listed(map(shown, zero), 6)}"
        fix = "save again: a ZeRO-3 or FSDP run that saves without gathering writes zeros, and so does a meta device"
        if all(".lora_B." in name for name in zero):
            fix = "save the adapter after training: PEFT starts these matrices at zero"
        findings.append(Finding("zeros", ERROR, said, fix, names=tuple(zero)))
    return findings


def _untrained(values: Mapping[str, Values], unread: Collection[str]) -> list[Finding]:
    judged = {name: each.is_drawn for name, each in values.items() if each.is_drawn is not None}
    drawn = [name for name, is_drawn in judged.items() if is_drawn]
    if not drawn:
        return []
    if len(drawn) == len(judged) and len(judged) > 1:
        said = f"all {len(judged)} matrices look freshly initialised: nothing was trained"
        fix = "if it was trained, the training code saved another model than the one that it trained"
        return [Finding("fresh", WARNING, said, fix, names=tuple(drawn))]
    said = f"{len(drawn)} of {len(judged)} matrices look freshly initialised"
    names = listed(map(shown, drawn), 6)
    if {*drawn} <= {*unread}:
        return [Finding("fresh", NOTE, f"{said}, and this model does not read them:{names}", names=tuple(drawn))]
    fix = (
        "train them, or look for their weights: a library that misses a name draws the tensor at random, and saving "
        "then writes it"
    )
    return [Finding("fresh", WARNING, f"{said}:{names}", fix, names=tuple(drawn))]


def _unchanged(values: Mapping[str, Values], title: str) -> list[Finding]:
    compared = {name: each.is_equal for name, each in values.items() if each.is_equal is not None}
    same = [name for name, is_equal in compared.items() if is_equal]
    if not compared:
        return []
    if len(same) == len(compared):
        said = f"all {len(same)} tensors equal {title}, bit for bit: nothing was trained, or it was not saved"
        return [Finding("unchanged", WARNING, said, "save the model that was trained; merge its adapter first")]
    if same:
        said = f"{len(same)} of {len(compared)} tensors equal {title}, bit for bit ({shown(same[0])})"
        return [Finding("unchanged", NOTE, said, names=tuple(same))]
    return []


def rows_of(tensors: Mapping[str, TensorInfo], layouts: Layouts | None) -> int | None:
    """The rows of the embeddings: of the tensor that has as many rows as the model's vocabulary."""
    size = getattr(layouts.config, "vocab_size", None) if layouts is not None else None
    return size if any(info.shape[:1] == (size,) for info in tensors.values()) else None
