"""Convert a decoder into a repo for search: a reranker or an embedder, compared with its source."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import is_ours
from blockformer.files.errors import ConversionError
from blockformer.files.json_files import json_text, read_json
from blockformer.files.names import MODULES, SETTINGS
from blockformer.files.progress import Progress
from blockformer.files.quantized import refuse_quantized
from blockformer.files.quiet import quiet
from blockformer.files.side_file_kinds import digest
from blockformer.files.sources import Source
from blockformer.model_classes import MODELS
from blockformer.publishing.repo_code import release_code
from blockformer.publishing.write_repo import write_repo

from .arguments import check_conversion, check_use, is_quick, verification
from .composite import TextCheckpoint
from .converting import recorder
from .exporting import own_groups, record_of
from .loading import load_tokenizer
from .model_tensors import expected_tensors
from .official import official_loader, rounded
from .origin import BEFORE
from .plan import Plan, architecture_of, our_config, parse_dtype
from .remedies import plan_or_refer
from .report import ConversionReport
from .rules.groups import Group, targets_of
from .search_texts import batches, tokens_of
from .undoing import RECORD
from .uses import HEAD, Embedder, Reranker, Use, kind_of
from .verify import TOLERANCE, Measured, Parity, fits, load_model
from .writing import AroundWeights, CheckpointWeights, check_tied_targets

TEMPLATE = "chat_template.jinja"


def convert_for_search(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    use: str,
    tokens: Sequence[str] | None = None,
    template: str | PathLike[str] | None = None,
    pooling: str | None = None,
    bidirectional: bool = False,
    prompts: Mapping[str, str] | None = None,
    family: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool | str = "auto",
    force: bool = False,
    strict_finite: bool = False,
    progress: Progress | None = None,
    **reading: Any,
) -> ConversionReport:
    """Write a decoder, official or ours, as a self-contained repo for search, which sentence-transformers opens.

    A reranker such as Qwen3-Reranker (Zhang et al., 2025) answers "no" or "yes", and its score compares the logits of
    these two tokens only. Here it becomes a classifier of one label: of the head's matrix the difference of two rows is
    left. `convert_reshaped` with `topology="decoder"` is the way back, of an embedder too.

    Args:
        src: a folder or Hub id, in an official layout or ours.
        dst: the repo to create.
        use: "reranker" or "embedder".
        tokens: of a reranker, whose score is the logit of the second token less that of the first; or one token, whose
            logit is the score.
        template: a file with the chat template that a reranker's pairs are written by, as messages with the roles
            "query" and "document"; None keeps the source's.
        pooling: of an embedder: "lasttoken", or "mean" of all tokens. None is "mean" with `bidirectional`.
        bidirectional: whether an embedder's tokens see later ones too (BehnamGhader et al., 2024); it needs training.
        prompts: of an embedder: name -> what is put before a text.
        family, dtype, max_shard_size, force, strict_finite, progress: see `convert`.
        verify: see `convert`. Source and result are run in float32 on 200 pairs or 30 texts; quick, on 20 or 10.
        reading: which files are read, and from where, see `convert`.

    Raises:
        ConversionError: see `convert`; or the model cannot be made into this.
    """
    of_use = {"tokens": tokens, "template": template, "pooling": pooling, "prompts": prompts}
    check_use(use, bidirectional=bidirectional, **of_use)
    options = check_conversion(
        src,
        dst,
        function="convert_for_search",
        family=family,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=verify,
        force=force,
        strict_finite=strict_finite,
        progress=progress,
        **reading,
    )
    made_for: Use = Reranker(list(tokens or ()))
    if use == "embedder":
        made_for = Embedder(pooling or ("mean" if bidirectional else "lasttoken"), bidirectional, dict(prompts or {}))
    with AroundWeights.opened(src, dst, options, **reading) as around:
        checkpoint, place, report = around.checkpoint, around.place, around.report
        if isinstance(checkpoint, TextCheckpoint):
            raise ConversionError(f"{place.path}: has towers next to the text; convert it first, then use the result")
        source = _decoder(checkpoint, family, parse_dtype(dtype))
        tokenizer: Any = load_tokenizer(os.fspath(src), place.path, f", and --as {use} needs one")
        if template is not None:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        before = _settings_before(checkpoint, place, use)
        made = made_for.config(source.config, tokenizer)
        groups = made_for.groups(source.groups, source.config)
        model_class = MODELS[architecture_of(made)]
        _, _, parameters = expected_tensors(model_class, made)
        report.notes += [] if source.plan is None else source.plan.notes

        def fill(folder: Path) -> None:
            record, code, copies = None, {}, []
            if source.plan is None:
                code, copies = release_code(place.path, made), record_of(checkpoint, place)
            else:
                record = recorder(source.plan, checkpoint, folder)
            side = around.fill(folder, made, code, copies, record)
            around.compare_tokenizers(side)
            files = made_for.files(made, tokenizer, before)
            files |= {} if template is None else {TEMPLATE: tokenizer.chat_template}
            _write_settings(folder, files, source, use)
            if verification(verify) != "none":
                few = is_quick(verify, parameters)
                loads, said = _loads(source, place, folder, made, made_for, dtype is not None)
                options.progress("comparing the models", 0, 0)
                report.parity = compare(made_for, loads, tokenizer, made, parameters, few)
                report.notes += [f"not verified: {report.not_verified}"] if report.not_verified else said
            origin = f"Made from `{place.name}` by Blockformer, for sentence-transformers: {made_for.sentence()}."
            around.write_card(folder, made, parameters, origin, report.compared("Compared with the source:"))

        check_tied_targets(checkpoint, source.groups, source.tied)
        write_repo(CheckpointWeights(checkpoint, groups, (), place.files), options, fill, report)
    if use == "reranker" and made_for.template(tokenizer) is None:
        report.notes.append(
            "no chat template formats pairs, so the tokenizer joins them; pass one with --template FILE"
        )
    if source.has_head and not made.tie_word_embeddings:
        report.notes.append("the language model's head is dropped, and this cannot be undone: keep the source")
    return report


@dataclass(frozen=True)
class _Decoder:
    """What is made into something else.

    Attributes:
        config, text: our config of it, and as a file.
        groups, tied: how its weights are made in our layout; see `Plan`.
        plan: its conversion into our layout; None where it is in it.
    """

    config: PretrainedConfig
    text: str
    groups: list[Group]
    tied: list[tuple[str, str]]
    plan: Plan | None

    @property
    def has_head(self) -> bool:
        """Whether the head is stored, be it equal to the embeddings or not."""
        return HEAD in targets_of(self.groups)


def _decoder(checkpoint: Checkpoint, family: str | None, cast: torch.dtype | None) -> _Decoder:
    if not is_ours(checkpoint.config):
        plan = plan_or_refer(checkpoint, family, cast)
        plan.target_config.architectures = [plan.target_class.__name__]
        return _Decoder(plan.target_config, plan.config_json, plan.groups, plan.tied, plan)
    if cast is not None:
        what = "dtype (--dtype) casts official checkpoints, and this one is in Blockformer's layout"
        raise ConversionError(f"{checkpoint.folder}: {what}; leave it out")
    refuse_quantized(checkpoint.config, checkpoint.tensors)
    config = our_config(checkpoint.config)
    config.architectures = [architecture_of(config)]
    groups, tied, _ = own_groups(checkpoint, config)
    return _Decoder(config, checkpoint.member("config.json").read_text(encoding="utf-8"), groups, tied, None)


def _settings_before(checkpoint: Checkpoint, place: Source, use: str) -> dict[str, Any]:
    """The settings of sentence-transformers in the source.

    Raises:
        ConversionError: it is an embedder already.
    """
    if use == "embedder" and MODULES in place.names:
        what = f"{place.path}: {MODULES} already says how this model embeds texts"
        raise ConversionError(f"{what}; leave out --as embedder, and everything is copied")
    return read_json(checkpoint.member(SETTINGS)) if SETTINGS in place.names else {}


def _write_settings(folder: Path, files: Mapping[str, Any], source: _Decoder, use: str) -> None:
    """Write the files of sentence-transformers, and into `BEFORE` what they replace and the config before."""
    kept = folder / BEFORE
    kept.mkdir(parents=True)
    (kept / "config.json").write_text(source.text, encoding="utf-8")
    for name, content in files.items():
        path = folder / name
        if path.exists():
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            path.rename(kept / name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json_text(content), encoding="utf-8")
    written = {name: digest(folder / name) for name in files}
    record = {"use": use, "has_head": source.has_head, "written": written}
    (kept / RECORD).write_text(json_text(record), encoding="utf-8")


Loads = Sequence[Callable[[], PreTrainedModel]]


def _loads(
    source: _Decoder, place: Source, folder: Path, made: PretrainedConfig, use: Use, is_cast: bool
) -> tuple[Loads, list[str]]:
    """What loads source and result in float32, and notes."""
    plan, result_config = source.plan, copy.deepcopy(made)

    def result() -> PreTrainedModel:
        return load_model(MODELS[kind_of(made)], result_config, folder, torch.float32)

    if plan is None:
        own_config = copy.deepcopy(source.config)
        own_config.bidirectional = made.bidirectional
        own_class = MODELS[kind_of(source.config)]
        return (lambda: load_model(own_class, own_config, place.path, torch.float32, place.loading), result), []
    official_config, notes = copy.deepcopy(plan.source_config), []
    if use.looks_both_ways and not source.config.bidirectional:
        if False in plan.family.settings.directions:
            official_config.is_causal = False
        else:
            result_config.bidirectional = False
            notes.append(
                "compared with causal attention on both sides: the official class cannot attend in both directions"
            )

    def official() -> PreTrainedModel:
        found = official_loader(plan, place)(plan.source_class, official_config, place.path, torch.float32)
        return plan.family.oracle.prepared(rounded(found, plan.dtype) if is_cast else found)

    return (official, result), notes


@torch.no_grad()
def compare(use: Use, loads: Loads, tokenizer: Any, config: PretrainedConfig, parameters: int, few: bool) -> Parity:
    """Run source and result on the same texts, in float32.

    Args:
        use: what the result is.
        loads: what loads source and result, of which one is in memory at a time.
        tokenizer: theirs.
        config, parameters: of the result.
        few: whether a tenth of the texts is enough.

    Raises:
        ConversionError: they differ.
    """
    if not fits(parameters, torch.float32):
        need = parameters * 4 / 2**30
        return Parity(notes=[f"not compared: one model in float32 needs {need:.1f} GiB, more than is free here"])
    ids = tokens_of(tokenizer, use.texts(few), use.template(tokenizer), config.max_position_embeddings)
    found: list[torch.Tensor] = []
    largest = 1.0
    for load in loads:
        with quiet():
            model = load().eval()
        values = [use.values(model, each) for each in batches(ids)]
        found.append(torch.cat([each for each, _ in values]))
        largest = max(largest, *(size for _, size in values))
        del model
    expected, given = found
    gap = (given - expected).abs().max().item()
    is_finite = bool(torch.isfinite(expected).all())
    gap = gap if gap == gap else float("inf")
    named = {"outputs": use.outputs, "unit": use.unit}
    measured = Measured("float32", gap, largest, TOLERANCE * largest, len(ids), None, is_finite, **named)
    parity = Parity([measured])
    if parity.disagrees:
        raise ConversionError(f"the {use.name} does not compute what its source computes: {parity}")
    return parity
