"""What the decoders share: their heads, and the prefix that a checkpoint of any head has or leaves out.

A class of today writes the stack's tensors behind a prefix, or without one if it is the stack alone. Other checkpoints
do it the other way round, whatever their head: that is a trait of their `Form`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from .base import Family, Form, Head

OURS = "BlockformerDecoder"
PREFIX, NO_PREFIX = "prefix", "no prefix"
"""Traits: names with the prefix where the official class of today has none, and the other way round."""
TOKEN_DROPOUT = 0.1
"""Before the official head of tokens, where the config does not say."""


@dataclass(frozen=True)
class DecoderHead(Head):
    """A head of a decoder.

    Attributes:
        root: prefix of the stack's tensors in the official class; "" for the stack alone.
        tensors: official tensor -> ours, beyond the stack's.
    """

    root: str = ""
    tensors: tuple[tuple[str, str], ...] = ()

    @property
    def bare(self) -> bool:
        """Whether it is the stack alone: then no name of a tensor has a prefix, in both layouts."""
        return not self.tensors

    @property
    def our_root(self) -> str:
        """Prefix of the stack's tensors in our class."""
        return "" if self.bare else "model."


def decoder_heads(prefix: str, root: str, lm: str = "ForCausalLM", **other: str) -> list[DecoderHead]:
    """The heads of a decoder, the language model first.

    Args:
        prefix: what the official classes' names begin with.
        root: prefix of the stack's tensors.
        lm: name of the language model.
        other: `span_root`, the prefix in the class for question answering; `token_score`, the name of the head of
            tokens; where they differ.
    """

    def both(official: str, ours: str) -> tuple[tuple[str, str], ...]:
        return tuple((f"{official}.{kind}", f"{ours}.{kind}") for kind in ("weight", "bias"))

    spans, tokens = other.get("span_root", root), other.get("token_score", "score")
    return [
        DecoderHead(prefix + lm, f"{OURS}ForCausalLM", root, (("lm_head.weight", "lm_head.weight"),)),
        DecoderHead(f"{prefix}Model", f"{OURS}Model"),
        DecoderHead(
            f"{prefix}ForSequenceClassification",
            f"{OURS}ForSequenceClassification",
            root,
            (("score.weight", "score.weight"),),
        ),
        DecoderHead(f"{prefix}ForTokenClassification", f"{OURS}ForTokenClassification", root, both(tokens, "score")),
        DecoderHead(
            f"{prefix}ForQuestionAnswering", f"{OURS}ForQuestionAnswering", spans, both("qa_outputs", "qa_outputs")
        ),
    ]


class HeadedDecoder(Family[DecoderHead]):
    """A decoder with the heads that Auto classes have.

    Args:
        name: the official `model_type`.
        config_class: name of the official configuration class.
        heads: what its models are for.
        inner: what the names of the stack's tensors begin with, without a prefix.
    """

    spoken = ("classifier_dropout", "hidden_dropout")

    def __init__(self, name: str, config_class: str, heads: Collection[DecoderHead], inner: tuple[str, ...]):
        super().__init__(name, config_class, heads)
        self.root = self.heads[0].root
        self.inner = inner

    def form(self, official, names: Collection[str] | None = None, read=None):
        """See `Family.form`. Without `architectures` the tensors tell."""
        names = names or ()
        head = self._head(official, names)
        trait, other = (NO_PREFIX, self.inner) if head.root else (PREFIX, (self.root,))
        return Form(head.official, frozenset([trait] if any(name.startswith(other) for name in names) else []))

    def _head(self, official: Mapping[str, Any], names: Collection[str]) -> DecoderHead:
        # Weights that were converted from another framework may still name its class.
        known = {head.official for head in self.heads}
        old = {framework + name: name for name in known for framework in ("TF", "Flax")}
        architectures = [old.get(name, name) for name in official.get("architectures") or []]
        if not architectures and names:
            held = [head for head in self.heads if not head.bare and all(theirs in names for theirs, _ in head.tensors)]
            if held:
                architectures = [max(held, key=lambda head: len(head.tensors)).official]
            elif official.get("tie_word_embeddings") is False:
                architectures = [next(head.official for head in self.heads if head.bare)]
        return self.head(super().form({"architectures": architectures}))

    def form_for(self, config, earlier: Form | None = None):
        """See `Family.form_for`."""
        form = super().form_for(config)
        if earlier is None or earlier.head != form.head:
            return form
        return Form(form.head, earlier.traits & {PREFIX, NO_PREFIX})

    def canonical(self, name, form):
        """See `Family.canonical`."""
        if PREFIX in form.traits:
            return name.removeprefix(self.root)
        return self.head(form).root + name if NO_PREFIX in form.traits and name.startswith(self.inner) else name

    def stored(self, name, form):
        """See `Family.stored`."""
        if PREFIX in form.traits:
            return self.root + name if name.startswith(self.inner) else name
        return name.removeprefix(self.head(form).root) if NO_PREFIX in form.traits else name

    def dropout_from(self, official: Mapping[str, Any], head: DecoderHead) -> float | None:
        """Our `classifier_dropout`: the official head of rows has none, that of tokens looks in two places."""
        if head.official.endswith("ForSequenceClassification"):
            return 0.0
        said = [official[name] for name in HeadedDecoder.spoken if official.get(name) is not None]
        fallback = TOKEN_DROPOUT if head.official.endswith("ForTokenClassification") else None
        return said[0] if said else fallback

    def dropout_to(self, config: PretrainedConfig, head: DecoderHead) -> dict[str, Any]:
        """The official entries for our `classifier_dropout`."""
        dropout = config.classifier_dropout
        if head.official.endswith("ForTokenClassification"):
            dropout = config.hidden_dropout if dropout is None else dropout
            dropout = None if dropout == TOKEN_DROPOUT else dropout
        if dropout is None or head.official.endswith("ForSequenceClassification"):
            return {}
        return {"classifier_dropout": dropout}
