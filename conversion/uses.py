"""What a decoder can be made into for search: what changes, what sentence-transformers reads of it, what is compared.

B rows, T length, C hidden size, V vocabulary.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.files.errors import ConversionError, shown
from blockformer.files.sentence_settings import of_embedder, of_reranker

from . import search_texts
from .rules.groups import Group, Target
from .rules.operations import Operation
from .search_texts import Texts

HEAD, TIED, SCORE = "lm_head.weight", "model.embed_tokens.weight", "score.weight"
OF_THE_HEAD = ("lm_head.", "logits_bias")
"""What the names of a language model head's weights begin with."""
WRITER, CLASSIFIER, STACK = (
    f"BlockformerDecoder{each}" for each in ("ForCausalLM", "ForSequenceClassification", "Model")
)


class Use(Protocol):
    """One of them.

    Attributes:
        name: what the result is called.
        unit: what is compared, in the plural.
        outputs: what is compared of each.
        looks_both_ways: whether tokens see later ones, which they did not in the source.
    """

    name: str
    unit: str
    outputs: str
    looks_both_ways: bool

    def config(self, before: PretrainedConfig, tokenizer: Any) -> PretrainedConfig:
        """The config of the result, of the source's.

        Raises:
            ConversionError: the model cannot be made into this, with what to do.
        """

    def groups(self, groups: Sequence[Group], before: PretrainedConfig) -> list[Group]:
        """The groups that make the result's weights, from the groups that make the source's."""

    def files(self, config: PretrainedConfig, tokenizer: Any, before: Mapping[str, Any]) -> dict[str, Any]:
        """File -> content, of the files that sentence-transformers reads; `before` are its settings in the source."""

    def texts(self, few: bool) -> Texts:
        """The texts to compare on."""

    def template(self, tokenizer: Any) -> str | None:
        """How the chat template reads a text; None where it is not used."""

    def values(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, float]:
        """What source or result computes of ids [B, T]: [B, ...], and the size that a difference is relative to."""

    def sentence(self) -> str:
        """What was done, for the card."""


@dataclass
class Reranker(Use):
    """A classifier of one label in place of the language model: its score is the difference of two logits.

    Attributes:
        tokens: the two tokens, such as "no" and "yes", or a single one.
        ids: their ids, once the model is made.
    """

    tokens: Sequence[str]
    ids: list[int] = field(default_factory=list)
    name = "reranker"
    unit = "pairs"
    outputs = "scores"
    looks_both_ways = False

    def config(self, before: PretrainedConfig, tokenizer: Any) -> PretrainedConfig:
        if before.architectures != [WRITER]:
            raise ConversionError(f"a reranker is made from a decoder that generates text, not from {kind_of(before)}")
        for name, neutral in (("final_logit_softcapping", None), ("lm_head_transform", False), ("lm_head_bias", False)):
            if (value := getattr(before, name)) != neutral:
                why = "its score is not a linear function of the last state; serve the language model itself"
                raise ConversionError(f"{name} is {value!r}, so no classifier can be this reranker: {why}")
        self.ids = [token_id(tokenizer, each) for each in self.tokens]
        if len({*self.ids}) != len(self.ids):
            raise ConversionError(f"tokens: {' and '.join(map(shown, self.tokens))} are the same token; name two")
        if (highest := max(self.ids)) >= before.vocab_size:
            raise ConversionError(f"tokens: token {highest} is outside the model's vocabulary of {before.vocab_size}")
        after = _with_class(before, CLASSIFIER)
        after.num_labels = 1
        if after.pad_token_id is None:  # a classifier finds the last token by it
            after.pad_token_id = tokenizer.pad_token_id
        return after

    def groups(self, groups: Sequence[Group], before: PretrainedConfig) -> list[Group]:
        """See `Use.groups`. The row is float32, whatever the head is, so that nothing is rounded."""
        makers = {target.name: (group, place) for group in groups for place, target in enumerate(group.targets)}
        group, place = makers[HEAD] if HEAD in makers else makers[TIED]
        row = _Row(group.op, place, group.targets[place].dtype, tuple(self.ids), before.logit_scale)
        score = Target(SCORE, torch.float32, (1, group.targets[place].shape[1]))
        kept = [each for each in groups if not each.targets[0].name.startswith(OF_THE_HEAD)]
        return [*kept, Group(group.sources, (score,), row)]

    def files(self, config: PretrainedConfig, tokenizer: Any, before: Mapping[str, Any]) -> dict[str, Any]:
        return of_reranker(self.template(tokenizer), before)

    def texts(self, few: bool) -> Texts:
        return search_texts.pairs(few)

    def template(self, tokenizer: Any) -> str | None:
        return search_texts.template_format(tokenizer)

    def values(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, float]:
        """See `Use.values`. A language model's logits of the last token, or the classifier's score."""
        if model.config.num_labels == 1 and "ForSequenceClassification" in type(model).__name__:
            return model(input_ids=ids).logits[:, 0].float(), 0.0
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        logits = model(input_ids=ids, **last).logits[:, -1, self.ids].float()  # [B, 1 or 2]
        return logits[:, -1] - (logits[:, 0] if len(self.ids) == 2 else 0), logits.abs().max().item()

    def sentence(self) -> str:
        names = [f"`{each}`" for each in self.tokens]
        return f"the score of a pair is the logit of {' minus that of '.join(reversed(names))} after its last token"


@dataclass
class Embedder(Use):
    """A decoder without a head, whose states become one vector of length 1.

    Attributes:
        pooling: "lasttoken" or "mean".
        looks_both_ways: see `Use`.
        prompts: name -> what sentence-transformers puts before a text.
    """

    pooling: str
    looks_both_ways: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    name = "embedder"
    unit = "texts"
    outputs = "vectors"

    def config(self, before: PretrainedConfig, tokenizer: Any) -> PretrainedConfig:
        if before.architectures not in ([WRITER], [STACK]):
            raise ConversionError(f"an embedder is made from a decoder, not from {kind_of(before)}")
        after = _with_class(before, STACK)
        if self.looks_both_ways:
            after.bidirectional = True
        self.looks_both_ways = after.bidirectional
        return after

    def groups(self, groups: Sequence[Group], before: PretrainedConfig) -> list[Group]:
        kept = [each for each in groups if not each.targets[0].name.startswith(OF_THE_HEAD)]
        return [each.renamed(lambda name: name.removeprefix("model.")) for each in kept]

    def files(self, config: PretrainedConfig, tokenizer: Any, before: Mapping[str, Any]) -> dict[str, Any]:
        return of_embedder(config.output_size, self.pooling, self.prompts, before)

    def texts(self, few: bool) -> Texts:
        return search_texts.texts(few)

    def template(self, tokenizer: Any) -> str | None:
        return None

    def values(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, float]:
        states = model.base_model(input_ids=ids).last_hidden_state.float()  # [B, T, C]
        vectors = states[:, -1] if self.pooling == "lasttoken" else states.mean(1)
        return torch.nn.functional.normalize(vectors, dim=-1), 1.0

    def sentence(self) -> str:
        pooled = "the state of the last token" if self.pooling == "lasttoken" else "the mean of all states"
        sees = "; tokens see later ones too, so **the model needs training**" if self.looks_both_ways else ""
        return f"the vector of a text is {pooled}, of length 1{sees}"


@dataclass(frozen=True)
class _Row:
    """The operation that makes a reranker's row [1, C] of what a head [V, C] is made of.

    Attributes:
        op: makes the head.
        place: which of its results that is.
        dtype: of the head, which may be cast.
        ids: of the tokens.
        scale: of the logits.
    """

    op: Operation
    place: int
    dtype: torch.dtype
    ids: tuple[int, ...]
    scale: float

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        rows = self.op.forward(tensors)[self.place][list(self.ids)].to(self.dtype).float()
        return [(rows[1:] - rows[:1] if len(self.ids) == 2 else rows) * self.scale]

    def forward_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [(1, shapes[0][1])]


def kind_of(config: PretrainedConfig) -> str:
    """The class that a config names, for an error."""
    return str((config.architectures or [type(config).__name__])[0])


def _with_class(config: PretrainedConfig, name: str) -> PretrainedConfig:
    """A copy of a config, of another class.

    Raises:
        ConversionError: the weights have 4 bits.
    """
    if getattr(config, "linear_bits", None) is not None:
        raise ConversionError(
            "4-bit weights: convert the checkpoint with dequantize (--dequantize bfloat16) first, then the result"
        )
    config = copy.deepcopy(config)
    config.architectures = [name]
    return config


def token_id(tokenizer: Any, token: str) -> int:
    """The id of a token, given as the vocabulary has it or as a text that is one token.

    Raises:
        ConversionError: it is none.
    """
    if token in (vocabulary := tokenizer.get_vocab()):
        return vocabulary[token]
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
        return ids[0]
    parts = ", ".join(map(shown, tokenizer.convert_ids_to_tokens(ids)))
    raise ConversionError(f"tokens: {shown(token)} is not one token of the tokenizer, which reads it as {parts}")
