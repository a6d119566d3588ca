"""How a family's checkpoints name and store their tensors, and how these map to ours."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError, shown

from ..rules.patterns import tuple_of
from ..rules.table import Rule, RuleTable
from ..storage.spelling import Alternative, OneName, Prefix, Spelling, Spellings
from ..storage.variant import CheckpointVariant
from .architectures import named_classes, unknown_class
from .head import Head
from .oracle import Oracle
from .settings import Settings
from .shared import FIELDS, Fields

HeadKind = TypeVar("HeadKind", bound=Head)

PREFIX, NO_PREFIX = "prefix", "no prefix"
"""Traits: names with a head's prefix in a checkpoint of the class without a head, and the other way round."""
HEAD_ONLY = "head in place of embeddings"
"""A trait of tied checkpoints."""
AS_IN_CLASS = "names of the class"
"""A trait: tensors as `state_dict` has them, where files usually have other names or forms."""


@dataclass(kw_only=True, eq=False)
class Names(ABC, Generic[HeadKind]):
    """The names and the layout of a family's tensors, in all variants of its checkpoints.

    Attributes:
        spellings: how names in its checkpoints usually differ from the names in the official class.
        former_classes: earlier names of official classes -> today's.
        has_own_layout: whether an official class has these models by themselves, not only as the text of a composite.
        refused: official classes of this `model_type` that no Blockformer class can be, with the reason.
        family, heads, settings: the family's name, heads and settings, which it enters.
    """

    spellings: Sequence[Spelling] = ()
    former_classes: Mapping[str, str] = field(default_factory=dict)
    has_own_layout: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)
    family: str = ""
    heads: Sequence[HeadKind] = ()
    settings: Settings = field(default_factory=Settings)

    topology: ClassVar[str]
    """What the family's presets are."""
    usual_fields: ClassVar[Fields] = FIELDS
    """What their configs call ours, where a family does not say it."""
    oracle: ClassVar[Oracle] = Oracle()
    """How the official class is run where the family does not say it."""

    def usual_heads(self, classes: str) -> Sequence[HeadKind]:
        """The heads of official classes, by their names, where they are as usual."""
        raise NotImplementedError

    @property
    def low_bits(self) -> bool:
        """Whether linear layers may keep 4-bit weights (AWQ): where their matrices are ours, one by one, unturned."""
        return False

    @property
    def own_traits(self) -> frozenset[str]:
        """Traits that a variant of a checkpoint that is a folder may have, beyond its spelling."""
        return frozenset()

    # Which head.

    def head(self, variant: CheckpointVariant) -> HeadKind:
        """The head that a variant names."""
        return next(head for head in self.heads if head.official == variant.head)

    def head_for(self, config: PretrainedConfig) -> HeadKind | None:
        """The head that a Blockformer config is for; the first of its topology where it does not say."""
        heads = [head for head in self.heads if head.config_class.model_type == config.model_type]
        if config.architectures:
            heads = [head for head in heads if head.ours == config.architectures[0]]
        return heads[0] if heads else None

    def known_head(self, config: PretrainedConfig) -> HeadKind:
        """The same.

        Raises:
            ConversionError: `architectures` names a head that the family does not have.
        """
        head = self.head_for(config)
        if head is None:
            raise ConversionError(
                f"config.json: architectures is {shown(config.architectures)}; of '{self.family}' only "
                f"{', '.join(head.ours for head in self.heads)} have an official layout"
            )
        return head

    def named(self, official: Mapping[str, Any]) -> list[str]:
        """The official classes that `architectures` names."""
        return named_classes(official, self.heads, self.former_classes)

    def check_class(self, named: Sequence[str]) -> None:
        """Refuse an official class that has no counterpart here, if `architectures` names it first."""
        if named and named[0] in self.refused:
            raise ConversionError(
                f"config.json: architectures is {shown(named)}, which cannot be converted: {self.refused[named[0]]}"
            )

    def find_head(self, official: Mapping[str, Any], names: Collection[str] | None) -> HeadKind:
        """The head that `architectures` names or, where it is missing, the one that the tensors show.

        Raises:
            ConversionError: see `variant_of`.
        """
        named = self.named(official)
        if not named:
            return self.head_by_tensors(official, names) if names else self.heads[0]
        self.check_class(named)
        found = next((head for head in self.heads if [head.official] == named), None)
        if found is None:
            fitting = self.head_by_tensors(official, names) if names else None
            raise unknown_class(official, self.heads, fitting, f"'{self.family}'")
        return found if names is None else self.stored_head(found, official, names)

    def stored_head(self, head: HeadKind, official: Mapping[str, Any], names: Collection[str]) -> HeadKind:
        """A head that `architectures` names, or the stack if the tensors have nothing of that head.

        Raises:
            ConversionError: it is a language model's, and the tensors do not show what was meant.
        """
        stack = next((each for each in self.heads if each.bare and each.config_class is head.config_class), None)
        found = self.in_class(names)
        own = {name for rule in head.rules for name in tuple_of(rule.source)}
        if head.bare or stack is None or own & found:
            return head
        other = self.head_by_tensors(official, names)
        if head.writes_text and not other.bare and other is not head and other.has_tensors_in(found):
            raise ConversionError(
                f"config.json: architectures is [{head.official!r}], and the tensors have the head of "
                f'{other.official}. Write "architectures": ["{other.official}"], and "num_labels", the rows of its head'
            )
        if lost := next((name for name in names if name.endswith(f".{self.head_name(head) or chr(0)}")), None):
            raise ConversionError(
                f"{shown(lost)} is the head of {head.official}, with something in front of its name: "
                "blockformer doctor FOLDER says what that is, and --mend NEW takes it out"
            )
        own = {name for name in own if not name.endswith(".bias")}  # of which there may be none
        weight = self.head_name(head)
        if self.settings.official_config(official).tie_word_embeddings:
            own.discard(weight)
        if not own:
            return head
        if own == {weight} and head.root and any(name.startswith(head.root) for name in names):
            raise ConversionError(
                f"config.json: architectures is [{head.official!r}] and tie_word_embeddings is false, and nothing "
                f"fills {weight}, which the official class would draw at random. Write "
                f'"architectures": ["{stack.official}"] if the model has no head, or "tie_word_embeddings": true if '
                "its embeddings are the head"
            )
        return stack

    def in_class(self, names: Collection[str]) -> set[str]:
        """The names of tensors as today's official class has them, whatever stands before them."""
        return set(map(Spellings(self.spellings).to_class, names))

    def head_by_tensors(self, official: Mapping[str, Any], names: Collection[str]) -> HeadKind:
        """The head of a checkpoint whose config does not say it."""
        return self.heads[0]

    def head_note(self, official: Mapping[str, Any], variant: CheckpointVariant) -> list[str]:
        """A note where the tensors make another class than `architectures` names, or none."""
        named = official.get("architectures") or []
        if not named or variant.head in self.named(official):
            return []
        has = "no such head" if self.head(variant).bare else "another head"
        said = f"config.json: architectures names {shown(', '.join(named))}, and the weights have {has}"
        return [f"{said}: converted as {variant.head}"]

    # The variant: which head, how the tensors are named.

    def variant_of(
        self,
        official: Mapping[str, Any],
        names: Collection[str] | None = None,
        read: Callable[[str], Tensor] | None = None,
    ) -> CheckpointVariant:
        """The variant of a checkpoint.

        Args:
            official: its `config.json`.
            names: its tensors; None takes the variant that the official classes write.
            read: name -> tensor, for a family whose variant depends on values too.

        Raises:
            ConversionError: `architectures` names a head that the family does not have.
        """
        head = self.find_head(official, names)
        return CheckpointVariant(head.official, self.traits_of_ties(head, official, names or ()))

    def variant_for(self, config: PretrainedConfig, earlier: CheckpointVariant | None = None) -> CheckpointVariant:
        """The variant in which a Blockformer config is written.

        Args:
            config: ours.
            earlier: the variant that the checkpoint came in; it is taken again where it still fits.

        Raises:
            ConversionError: `architectures` names a head that the family does not have.
        """
        head = self.known_head(config)
        if earlier is None or earlier.head != head.official:
            return CheckpointVariant(head.official)
        fits = {each.name for several in self.alternatives(head) for each in several}
        fits |= {AS_IN_CLASS} | ({HEAD_ONLY} if config.tie_word_embeddings else set())
        return CheckpointVariant(head.official, earlier.traits & fits)

    @property
    def inner(self) -> tuple[str, ...]:
        """What the names of the stack's tensors begin with, after their prefix."""
        return ()

    def root_of(self, head: HeadKind) -> str:
        """Prefix of the official names of the stack's tensors with this head."""
        return head.root

    def alternatives(self, head: HeadKind) -> Sequence[Sequence[Alternative]]:
        """Other ways in which checkpoints of this head write names: of each list at most one, the first shown."""
        return [self.prefixes(head)]

    def prefixes(self, head: HeadKind) -> list[Alternative]:
        """The prefix that names have with a head, in a checkpoint without one; and the other way round."""
        bare = next((self.root_of(each) for each in self.heads if each.bare), "")
        with_head = next((root for each in self.heads if (root := self.root_of(each)) != bare), bare)
        own = self.root_of(head)
        name, other = (PREFIX, with_head) if own == bare else (NO_PREFIX, bare)
        starts = (other,) if other else self.inner
        return [] if own == other else [Alternative(name, Prefix(other, own, self.inner), starts, usual=own)]

    def shown_alternatives(self, head: HeadKind, names: Collection[str]) -> frozenset[str]:
        """The names of the alternatives that a checkpoint's tensors show."""
        shown = ([each.name for each in several if each.is_shown(names)] for several in self.alternatives(head))
        own = [AS_IN_CLASS] if self._are_of_the_class(names) else []
        return frozenset([*own, *(found[0] for found in shown if found)])

    def _are_of_the_class(self, names: Collection[str]) -> bool:
        """Whether names that files usually spell otherwise are the class's."""
        usual = Spellings(self.spellings)
        is_other = any(usual.to_file(name) != name for name in names)
        return is_other and all(usual.to_class(name) == name for name in names)

    @property
    def words(self) -> frozenset[str]:
        """All traits that the record of a conversion may have."""
        lists = (several for head in self.heads for several in self.alternatives(head))
        return self.own_traits | {HEAD_ONLY, AS_IN_CLASS} | {each.name for several in lists for each in several}

    def traits_of_ties(
        self, head: HeadKind, official: Mapping[str, Any], names: Collection[str], traits: Collection[str] = ()
    ) -> frozenset[str]:
        """Whether a tied checkpoint holds the head's matrix in place of the embeddings: transformers reads either.

        Args:
            head: of the checkpoint.
            official: its `config.json`.
            names: its tensors, by their names in the class.
            traits: what else is known of it.
        """
        weight = self.head_name(head)
        if weight not in names or not {*self.embeddings_names(head, traits)}.isdisjoint(names):
            return frozenset()
        return frozenset([HEAD_ONLY] if self.settings.official_config(official).tie_word_embeddings else [])

    def head_name(self, head: HeadKind) -> str:
        """The class's name of a language model's matrix; "" without one."""
        return str(next((rule.source for rule in head.rules if rule.target == "lm_head.weight"), ""))

    def embeddings_names(self, head: HeadKind, traits: Collection[str]) -> Sequence[str]:
        """The class's names of the embeddings that the head may be tied to."""
        return ()

    def spelled(self, variant: CheckpointVariant) -> Spellings:
        """How names in a checkpoint of this variant differ from the names in the official class."""
        head = self.head(variant)
        lists = self.alternatives(head)
        chosen = (each.spelling for several in lists for each in several if each.name in variant.traits)
        ties: list[Spelling] = []
        if HEAD_ONLY in variant.traits:
            ties.append(OneName(self.head_name(head), self.embeddings_names(head, variant.traits)[0]))
        own = () if AS_IN_CLASS in variant.traits else self.spellings
        return Spellings([*chosen, *own, *ties])

    # The tensors.

    def storage(self, variant: CheckpointVariant, config: PretrainedConfig) -> Sequence[Rule]:
        """The first step: which tensors of a checkpoint are which of the official class.

        Names are the class's (see `spelled`). Tensors that no rule takes are stored as the class has them.

        Args:
            variant: of the checkpoint.
            config: ours, for rules that need a size.
        """
        return ()

    @abstractmethod
    def layout(self, variant: CheckpointVariant, config: PretrainedConfig) -> RuleTable:
        """The second step: which tensors of the official class are which of ours.

        What the table ignores is stored next to the weights, for the way back.

        Args:
            variant: of the official checkpoint.
            config: ours, for rules that need a size.
        """

    def reads_ignored(self, name: str) -> bool:
        """Whether `check_ignored` looks at the values of this tensor; others are not read."""
        return False

    def check_ignored(self, name: str, tensor: Tensor) -> str | None:
        """Why an ignored tensor is not what it must be for being ignored, or None. `name` is the class's."""
        return None

    def class_arguments(self, variant: CheckpointVariant) -> dict[str, Any]:
        """What the official class takes in addition to its config."""
        return {}

    def notes(self, variant: CheckpointVariant) -> list[str]:
        """What a user must know about the conversion of a checkpoint of this variant."""
        return []

    def notes_on_writing(self, config: PretrainedConfig) -> list[str]:
        """What a user must know about writing a model of this Blockformer config in the official layout."""
        return []
