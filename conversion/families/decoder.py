"""What decoders share: their heads, and the prefix that a checkpoint has or leaves out.

Today's classes write the stack's tensors with a prefix, or without one if the model is the stack alone. Some
checkpoints do the opposite, whatever their head: that is a trait of their `Form`.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers import PretrainedConfig

from ..rules.table import Rule, RuleTable
from .base import Family
from .fields import RELEASED, Form, Head

OURS = "BlockformerDecoder"
PREFIX, NO_PREFIX = "prefix", "no prefix"
"""Traits: names with the prefix where the official class of today has none, and the other way round."""
TOKEN_DROPOUT = 0.1
"""Before the official head of tokens, where the config does not say."""
DROPOUT_ENTRIES = ("classifier_dropout", "hidden_dropout")


def decoder_heads(
    prefix: str,
    root: str,
    lm: str = "ForCausalLM",
    spans: str = "",
    tokens: str = "score",
    head_bias: bool = False,
    bare_root: str = "",
    part: str = "",
):
    """The heads of a decoder that this release of transformers has, the language model first.

    Args:
        prefix: what the official classes' names begin with.
        root: prefix of the stack's tensors.
        lm: name of the language model.
        spans: prefix of the stack's tensors in the class for question answering, where it differs.
        tokens: name of the head of tokens.
        head_bias: whether the head of the language model may have a bias.
        bare_root: prefix of the stack's tensors in the class without a head.
        part: what the names of all other classes have before their task, where a model is part of another one.
    """
    head = {"lm_head.weight": "lm_head.weight"} | ({"lm_head.bias": "lm_head.bias"} if head_bias else {})
    own: list[tuple[Any, ...]] = [
        (lm, "ForCausalLM", root, {}, head),
        ("Model", "Model", bare_root, {}, {}),
        ("ForSequenceClassification", "ForSequenceClassification", root, {}, {"score.weight": "score.weight"}),
        ("ForTokenClassification", "ForTokenClassification", root, {tokens: "score"}, {}),
        ("ForQuestionAnswering", "ForQuestionAnswering", spans or root, {"qa_outputs": "qa_outputs"}, {}),
    ]
    named = [(prefix + official if official == lm else prefix + part + official, *rest) for official, *rest in own]
    return [Head(official, OURS + ours, *rest) for official, ours, *rest in named if official in RELEASED]


class ClassifierDropout:
    """Our `classifier_dropout`: the official head of rows has none, that of tokens looks in two places."""

    def read(self, official):
        """See `Value.read`."""
        name = official.head.official
        if name.endswith("ForSequenceClassification"):
            return {"classifier_dropout": 0.0}
        said = [official.entries[each] for each in DROPOUT_ENTRIES if official.entries.get(each) is not None]
        fallback = TOKEN_DROPOUT if name.endswith("ForTokenClassification") else None
        return {"classifier_dropout": said[0] if said else fallback}

    def write(self, config, head):
        """See `Value.write`."""
        dropout = config.classifier_dropout
        if head.official.endswith("ForTokenClassification"):
            dropout = config.hidden_dropout if dropout is None else dropout
            dropout = None if dropout == TOKEN_DROPOUT else dropout
        if dropout is None or head.official.endswith("ForSequenceClassification"):
            return {}
        return {"classifier_dropout": dropout}


class DecoderFamily(Family[Head]):
    """A decoder with the heads that Auto classes have.

    Args:
        name: the official `model_type`.
        config_class: name of the official configuration class.
        heads: what its models are for, the language model first.
        rules: the rules of the stack's tensors for a config of ours, without prefixes.
        inner: what their official names begin with.
        ignored: official names of the stack that are computed, not trained.
        settings: the arguments of `ConfigTranslation`.
    """

    def __init__(
        self,
        name: str,
        config_class: str,
        heads: Sequence[Head],
        *,
        rules: Callable[[PretrainedConfig], list[Rule]],
        inner: tuple[str, ...],
        ignored: Collection[str] = (),
        **settings,
    ):
        old = {framework + head.official: head.official for head in heads for framework in ("TF", "Flax")}
        old |= settings.pop("former_names", {})
        extra = (*DROPOUT_ENTRIES, *settings.pop("extra_fields", ()))
        super().__init__(name, config_class, heads, extra_fields=extra, former_names=old, **settings)
        self.root = self.heads[0].root
        self.stack_rules = rules
        self.inner = inner
        self.ignored = tuple(ignored)

    def form(self, official, names: Collection[str] | None = None, read=None):
        """See `Family.form`. Without `architectures` the tensors tell."""
        head = self.find_head(official, names)
        trait, other = (NO_PREFIX, self.inner) if head.root else (PREFIX, (self.root,))
        return Form(head.official, frozenset([trait] if any(name.startswith(other) for name in names or ()) else []))

    def head_by_tensors(self, official, names):
        """See `Family.head_by_tensors`."""
        held = [head for head in self.heads if not head.bare and head.has_tensors_in(names)]
        if held:
            return max(held, key=lambda head: len(head.rules))
        untied = official.get("tie_word_embeddings") is False
        return next(head for head in self.heads if head.bare) if untied else self.heads[0]

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

    def rules_for(self, form, config):
        """See `Family.rules_for`."""
        head = self.head(form)
        rules = [rule.under(head.root, head.our_root) for rule in self.stack_rules(config)]
        return RuleTable([*rules, *head.rules], ignored=[head.root + name for name in self.ignored])
