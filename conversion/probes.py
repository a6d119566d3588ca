"""Inputs for two models that are to compute the same, and what a model computes of them.

B batch, T length, S length of an encoder's states, C their width, V vocabulary.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from blockformer.inputs import inputs_of

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
        by_first_token: whether a row's summary is read at its first token, which then must be real.
    """

    name: str
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    by_first_token: bool = True

    @property
    def target(self) -> Tensor | None:
        """What the decoder of an encoder-decoder reads, [B, T]."""
        return self.others.get("decoder_input_ids")


def probes(config: PretrainedConfig, counts_padding: bool = False) -> list[Probe]:
    """Inputs that fit one of our models: random, structured (a ramp, a repetition), and padded on the left.

    What else the model takes is random (see `inputs_of`). Of a decoder the second random row is padded on the right;
    encoders get right padding as a separate input. Some official classes count padding among the positions and take
    no position ids: encoder-decoders with embedded positions, and families with `counts_padding`. They get right
    padding only. Models that recognize padding by its token count positions by themselves.

    Texts are what users have: they end in the end token, or in the padding token, which is one and the same in many
    models, and hold the padding token inside. What the mask hides is the padding token.
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
    positions = (padded.cumsum(-1) - 1).clamp(min=0)
    _, *rest = inputs_of(config)
    others = {each.name: each.example(ROWS, 7 if each.kind == "states" else length, generator) for each in rest}

    has_source, is_decoder = getattr(config, "is_encoder_decoder", False), getattr(config, "is_decoder", True)
    relative = getattr(config, "position_type", "") == "relative_bias"
    is_source = relative or has_source
    counts_itself = is_source or counts_padding or getattr(config, "padding_position", "") == "by_token"
    texts = [
        ("random", random, full if is_source or not is_decoder else padded.flip(0, -1), count),
        ("structured", torch.stack([ramp, repeated]), full, count),
    ]
    if relative or not (counts_padding or has_source):
        texts.append(("padded", random, padded, positions))
    if counts_padding or not is_decoder:
        texts.append(("padded on the right", random, padded.flip(-1), count))

    end, pad = (_token(token, vocabulary) for token in (config.eos_token_id, config.pad_token_id))
    inside, hidden = pad, pad
    if is_source and end == pad:  # some heads need as many end tokens in each row
        inside = hidden = None
    for each in rest:
        if each.kind == "tokens":
            held = inside if inside is not None and inside < each.size else None
            others[each.name] = _text(_without(others[each.name], (pad,)), full, held)
    inputs = []
    for name, ids, mask, places in texts:
        last = inside if name == "structured" and inside is not None and not is_source else end
        ids = _without(ids, (pad, end) if is_source else (pad,))
        ids = _text(ids, mask, inside, (end, last), hidden)
        own = None if counts_itself else places
        inputs.append(Probe(name, ids, mask, own, others, by_first_token=not (is_decoder or has_source)))
    return inputs


def _token(token: Any, vocabulary: int) -> int | None:
    """A special token of a config, the first of several; None where there is none."""
    token = token[0] if isinstance(token, list | tuple) and token else token
    return token if isinstance(token, int) and 0 <= token < vocabulary else None


def _text(
    ids: Tensor,
    mask: Tensor,
    inside: int | None,
    ends: tuple[int | None, ...] = (None, None),
    hidden: int | None = None,
) -> Tensor:
    """The ids [B, T] with one token inside, one at the end of each row, and one where the mask hides them.

    None leaves them as they are.
    """
    ids = ids.clone() if hidden is None else ids.masked_fill(mask == 0, hidden)
    for row, end in enumerate(ends):
        real = mask[row].nonzero().flatten()
        if inside is not None and len(real) > 2:
            ids[row, real[1]] = inside
        if end is not None:
            ids[row, real[-1]] = end
    return ids


def _without(ids: Tensor, tokens: Collection[Any]) -> Tensor:
    """The ids with the smallest other token in place of these tokens."""
    other = next(token for token in range(len(tokens) + 1) if token not in tokens)
    for token in tokens:
        ids = ids if token is None else ids.masked_fill(ids == token, other)
    return ids


def writes_from(model: PreTrainedModel, probe: Probe) -> bool:
    """Whether a model is to write a text from an input, which one that sees all of a text at once cannot.

    Where only the tokens of a picture see each other ("vision"), a model writes as usual.
    """
    flags = (getattr(model.config, name, False) for name in ("bidirectional", "use_bidirectional_attention"))
    reads_only = any(flag not in (None, False, "vision") for flag in flags)
    reads_only = reads_only or getattr(model.config, "is_causal", True) is False
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
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config.return_dict = True  # outputs are read by name, here and by official classes of their parts
    passes = passes or Passes()
    outputs: list[Tensor] = []
    texts: list[list[int]] = []
    names: list[str] = []
    for probe in inputs:
        with passes.counted(model):
            output = _output(model, _arguments(model, probe, shift))
        values, names = _compared(output, probe)
        outputs += values
        if writes_text and writes_from(model, probe):
            with passes.counted(model, TEXT, calls=NEW_TOKENS):
                texts.append(_written_text(model, probe))
    return outputs, texts, " and ".join(names)


def _output(model: PreTrainedModel, arguments: dict[str, Any]) -> Any:
    """What a model gives for arguments; a row at a time where its official class takes no more.

    These are the classifiers of decoders without a padding token.
    """
    takes_rows = "ForSequenceClassification" in type(model).__name__ and not model.config.is_encoder_decoder
    if not takes_rows or isinstance(getattr(model.config, "pad_token_id", None), int):
        return model(**arguments)
    each = [
        {name: given[row : row + 1] if isinstance(given, Tensor) else given for name, given in arguments.items()}
        for row in range(ROWS)
    ]
    return {"logits": torch.cat([model(**row).logits for row in each])}


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
    """The outputs that are compared, in float32, [places, ...], and their names."""
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
        else:
            rows = mask[:, 0] if probe.by_first_token else torch.ones(len(mask), dtype=torch.bool)
            compared.append(values.reshape(len(mask), -1)[rows].float())
    return compared, names


def _written_text(model: PreTrainedModel, probe: Probe) -> list[int]:
    """The tokens that a model writes after an input."""
    own_config = getattr(model.config, "text_config", model.config)
    pad = getattr(own_config, "pad_token_id", None)  # some official classes leave it out
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
