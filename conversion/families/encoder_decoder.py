"""What encoder-decoders share: two stacks, embeddings under up to three names, and a head that may be tied.

A checkpoint with tied embeddings stores one matrix, `shared.weight`, and possibly its copies in the two stacks and the
head. Which of them it has is part of its `CheckpointVariant`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockformer.files.safetensors_io import bytes_of

from ..rules.operations import Copies
from ..rules.table import Rule, RuleTable
from ..storage.variant import CheckpointVariant
from ..values import Computed, Value
from .head import VALUE_HEAD, Head
from .names import Names
from .settings import Settings

SHARED, ENCODER, DECODER = EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
LM_HEAD = "lm_head.weight"
UNTIED, SEPARATE = "untied", "separate"
"""Traits, after the names of the stored embeddings: its own head, and separate embeddings for each stack."""
BOTH = "BlockformerEncoderDecoder"


def encoder_decoder_heads(classes: str, rows: str, root: str = "") -> list[Head]:
    """The heads of an encoder-decoder.

    Args:
        classes: names of the official classes, the language model first.
        rows: prefix of the stacks' tensors in the class for rows.
        root: the same in the other classes, except for single stacks.
    """
    classifier = {"classification_head.dense": "dense", "classification_head.out_proj": "score"}
    kinds: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
        "ForConditionalGeneration": (root, {}, {LM_HEAD: LM_HEAD}),
        "ForSequenceClassification": (rows, classifier, {}),
        "ForQuestionAnswering": (root, {"qa_outputs": "qa_outputs"}, {}),
        "Model": ("", {}, {}),
    }
    found = {name: next(kind for kind in kinds if name.endswith(kind)) for name in classes.split()}
    return [Head(name, BOTH + kind, *kinds[kind]) for name, kind in found.items()]


def stacks_of(head: Head) -> tuple[str, ...]:
    """The stacks that a head has."""
    return ("encoder", "decoder") if head.ours.startswith(BOTH) else ("encoder",)


class HeadDropout(Value):
    """Our `classifier_dropout`, whose None is `hidden_dropout`: the official class always has a number."""

    def read(self, official):
        dropout = official.config.classifier_dropout  # null in some files, which no class with such a head can run
        return {"classifier_dropout": None if dropout is None else float(dropout)}

    def write(self, config, head):
        dropout = config.classifier_dropout
        return {"classifier_dropout": config.hidden_dropout if dropout is None else dropout}


def same_bits(read: Callable[[str], Tensor], first: str, second: str) -> bool:
    """Whether two tensors have the same bytes."""
    return torch.equal(bytes_of(read(first)), bytes_of(read(second)))


@dataclass(kw_only=True, eq=False)
class EncoderDecoderSettings(Settings):
    """The settings of an encoder-decoder.

    Attributes:
        reads_source: whether the official model without a head shifts the source for a decoder without a target.
    """

    reads_source: bool = False

    @property
    def values(self):
        return [*super().values, Computed(self._read_source)]

    def _read_source(self, official):
        return {"decoder_reads_source": self.reads_source} if official.head.ours.startswith(BOTH) else {}

    @property
    def always_read(self):
        return ("is_encoder_decoder",)


@dataclass(kw_only=True, eq=False)
class EncoderDecoderNames(Names[Head]):
    """The names of two stacks, or of the encoder of the two.

    Attributes:
        rules: (stack, config of ours) -> the rules of a stack's tensors, the embeddings excepted, without prefixes.
    """

    rules: Callable[[str, PretrainedConfig], list[Rule]]

    topology = "encoder_decoder"
    inner = ("shared.", "encoder.", "decoder.")

    @property
    def own_traits(self):
        return frozenset({*EMBEDDINGS, UNTIED, SEPARATE})

    def stored_embeddings(self, head: Head, names: Collection[str]) -> list[str]:
        """Which of the names of the embeddings are among these."""
        return [name for name in EMBEDDINGS if head.root + name in names]

    def head_of_rows(self, names: Collection[str]) -> Head | None:
        """The head other than a language model's that these tensors show, if they show one."""
        found = self.in_class(names)
        return next((head for head in self.heads if head.modules and head.has_tensors_in(found)), None)

    def embeddings_names(self, head, traits):
        is_shared = SEPARATE not in traits and self.settings.constant.get("share_embeddings") is not False
        return [head.root + name for name in (EMBEDDINGS if is_shared else [DECODER])]

    def as_in_class(
        self,
        head: Head,
        official: Mapping[str, Any],
        names: Collection[str],
        read: Callable[[str], Tensor] | None,
        known: Collection[str] = (),
    ) -> tuple[set[str], list[str], Callable[[str], Tensor] | None]:
        """What is known of a checkpoint and its spelling, its names by today's, and what reads a tensor by them."""
        traits = {*known} | self.shown_alternatives(head, names)
        in_class = list(map(self.spelled(CheckpointVariant(head.official, frozenset(traits))).to_class, names))
        traits |= self.traits_of_ties(head, official, in_class, traits)
        spelling = self.spelled(CheckpointVariant(head.official, frozenset(traits)))
        found = list(map(spelling.to_class, names))
        return traits, found, None if read is None else lambda name: read(spelling.to_file(name))

    def layout(self, variant, config):
        head, traits = self.head(variant), variant.traits
        stacks = stacks_of(head)
        ours = {stack: head.our_root + (f"{stack}." if len(stacks) > 1 else "") for stack in stacks}
        stored = [name for name in EMBEDDINGS if name in traits and (name != DECODER or SEPARATE not in traits)]
        rules = []
        if stored:
            names = tuple(head.root + name for name in stored)
            rules.append(Rule(names, f"{ours['encoder']}embed_tokens.weight", Copies(len(stored))))
        if SEPARATE in traits:
            rules.append(Rule(head.root + DECODER, f"{ours['decoder']}embed_tokens.weight"))
        for stack in stacks:
            rules += [rule.under(f"{head.root}{stack}.", ours[stack]) for rule in self.rules(stack, config)]
        ignored = [head.root + name for name in self.ignored(variant, config)]
        return RuleTable([*rules, *head.rules, *self.more_rules(variant)], ignored=[*ignored, *VALUE_HEAD])

    def more_rules(self, variant: CheckpointVariant) -> list[Rule]:
        """Rules in addition to the ones of the stacks and the head."""
        return []

    def ignored(self, variant: CheckpointVariant, config: PretrainedConfig) -> list[str]:
        """Official names, without the head's prefix, of tensors that no model uses."""
        return []
