"""Inputs for two models that are to compute the same, and what a model computes of them.

B batch, T length, S length of an encoder's states, C their width, V vocabulary.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from blockformer.inputs import inputs_of
from blockformer.model.positions import positions_from_mask

from .progress import Passes

NEW_TOKENS = 8
TEXT = 2
"""How many passes over an input take about as long as writing those tokens."""
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
