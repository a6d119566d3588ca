"""A family: how one kind of official checkpoint is named and stored, and how its tensors map to ours.

Configs are in `translation.py`; values that need more than a new name are in `values/`.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.files.errors import ConversionError, shown

from ..rules.patterns import tuple_of
from ..rules.table import Rule, RuleTable
from ..storage.spelling import Alternative, OneName, Spelling, Spellings
from ..storage.variant import CheckpointVariant
from .architectures import named_classes, unknown_class
from .head import Head
from .translation import ConfigTranslation

HeadKind = TypeVar("HeadKind", bound=Head)


HEAD_ONLY = "head in place of embeddings"
"""A trait of tied checkpoints."""


class Family(ConfigTranslation, Generic[HeadKind]):
    """One official kind of model, with its heads. The arguments are as in `ConfigTranslation`."""

    heads: tuple[HeadKind, ...]
    has_low_bits = False
    """Whether its linear layers may keep 4-bit weights (AWQ): where their matrices are ours, one by one, unturned."""
    counts_padding = False
    """Whether the official class counts padding among the positions, and takes no position ids."""
    padding_by_token = False
    """Whether the official class tells padding by its token, so that no text can hold that, whatever the mask says."""
    own_spellings = Spellings()
    """How names in all its checkpoints differ from the names in today's class."""
    is_file = False
    """Whether a checkpoint is one weight file with a file of settings, and is only read, never written."""
    own_traits: frozenset[str] = frozenset()
    """Traits that a variant of a checkpoint that is a folder may have, beyond its spelling."""

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

    def alternatives(self, head: HeadKind) -> Sequence[Sequence[Alternative]]:
        """Other ways in which checkpoints of this head write names: of each list at most one, the first shown."""
        return ()

    def shown_alternatives(self, head: HeadKind, names: Collection[str]) -> frozenset[str]:
        """The names of the alternatives that a checkpoint's tensors show."""
        shown = ([each.name for each in several if each.is_shown(names)] for several in self.alternatives(head))
        return frozenset(found[0] for found in shown if found)

    @property
    def words(self) -> frozenset[str]:
        """All traits that the record of a conversion may have."""
        lists = (several for head in self.heads for several in self.alternatives(head))
        return self.own_traits | {HEAD_ONLY} | {each.name for several in lists for each in several}

    def traits_of_ties(
        self, head: HeadKind, official: Mapping[str, Any], names: Collection[str], traits: Collection[str] = ()
    ) -> frozenset[str]:
        """Whether a tied checkpoint holds the head's matrix in place of the embeddings: transformers reads either.

        Args:
            head: of the checkpoint.
            official: its `config.json`.
            names: its tensors, by today's names.
            traits: what else is known of it.
        """
        weight = self.head_name(head)
        if weight not in names or not {*self.embeddings_names(head, traits)}.isdisjoint(names):
            return frozenset()
        return frozenset([HEAD_ONLY] if self.official_config(official).tie_word_embeddings else [])

    def head_name(self, head: HeadKind) -> str:
        """Today's name of a language model's matrix; "" without one."""
        return str(next((rule.source for rule in head.rules if rule.target == "lm_head.weight"), ""))

    def embeddings_names(self, head: HeadKind, traits: Collection[str]) -> Sequence[str]:
        """Today's names of the embeddings that the head may be tied to."""
        return ()

    def spellings_of_ties(self, variant: CheckpointVariant) -> list[Spelling]:
        """The spelling of a checkpoint that holds the head's matrix in place of the embeddings."""
        if HEAD_ONLY not in variant.traits:
            return []
        head = self.head(variant)
        return [OneName(self.head_name(head), self.embeddings_names(head, variant.traits)[0])]

    def find_head(self, official: Mapping[str, Any], names: Collection[str] | None) -> HeadKind:
        """The head that `architectures` names or, where it is missing, the one that the tensors show.

        Raises:
            ConversionError: see `variant_of`.
        """
        named = named_classes(official, self.heads, self.former_names)
        if not named:
            return self.head_by_tensors(official, names) if names else self.heads[0]
        if named[0] in self.refused:
            raise ConversionError(
                f"config.json: architectures is {shown(named)}, which cannot be converted: {self.refused[named[0]]}"
            )
        found = next((head for head in self.heads if [head.official] == named), None)
        if found is None:
            fitting = self.head_by_tensors(official, names) if names else None
            raise unknown_class(official, self.heads, fitting, f"'{self.name}'")
        return found if names is None else self.stored_head(found, official, names)

    def stored_head(self, head: HeadKind, official: Mapping[str, Any], names: Collection[str]) -> HeadKind:
        """A head that `architectures` names, or the stack if the tensors have nothing of that head.

        Raises:
            ConversionError: it is a language model's, and the tensors do not show what was meant.
        """
        stack = next((each for each in self.heads if each.bare and each.config_class is head.config_class), None)
        found = set(map(self.own_spellings.to_class, names))
        own = {name for rule in head.rules for name in tuple_of(rule.source)}
        if head.bare or stack is None or own & found:
            return head
        own = {name for name in own if not name.endswith(".bias")}  # of which there may be none
        weight = self.head_name(head)
        if self.official_config(official).tie_word_embeddings:
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

    def head_note(self, official: Mapping[str, Any], variant: CheckpointVariant) -> list[str]:
        """A note where the tensors make another class than `architectures` names, or none."""
        named = official.get("architectures") or []
        if not named or variant.head in named_classes(official, self.heads, self.former_names):
            return []
        has = "no such head" if self.head(variant).bare else "another head"
        said = f"config.json: architectures names {shown(', '.join(named))}, and the weights have {has}"
        return [f"{said}: converted as {variant.head}"]

    def head_by_tensors(self, official: Mapping[str, Any], names: Collection[str]) -> HeadKind:
        """The head of a checkpoint whose config does not say it."""
        return self.heads[0]

    def variant_for(self, config: PretrainedConfig, earlier: CheckpointVariant | None = None) -> CheckpointVariant:
        """The variant in which a config of ours is written.

        Args:
            config: ours.
            earlier: the variant that the checkpoint came in; it is taken again where it still fits.

        Raises:
            ConversionError: `architectures` names a head that the family does not have.
        """
        head = self.known_head(config).official
        stays = earlier is not None and earlier.head == head and config.tie_word_embeddings
        return CheckpointVariant(head, earlier.traits & {HEAD_ONLY} if earlier is not None and stays else frozenset())

    def known_head(self, config: PretrainedConfig) -> HeadKind:
        head = self.head_for(config)
        if head is None:
            raise ConversionError(
                f"config.json: architectures is {shown(config.architectures)}; of '{self.name}' only "
                f"{', '.join(head.ours for head in self.heads)} have an official layout"
            )
        return head

    # The tensors.

    def storage(self, variant: CheckpointVariant, config: PretrainedConfig) -> Sequence[Rule]:
        """The first step: which tensors of a checkpoint are which of today's official class.

        Names are today's (see `spellings`). Tensors that no rule takes are stored as the class has them.

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

    def extra_code(self) -> dict[str, Path]:
        """Code that a converted repo carries in addition to the model's: its path in the repo -> ours."""
        return {}

    def notes(self, variant: CheckpointVariant) -> list[str]:
        """What a user must know about the conversion of a checkpoint of this variant."""
        return []

    def notes_on_writing(self, config: PretrainedConfig) -> list[str]:
        """What a user must know about writing a model of this config of ours in the official layout."""
        return []

    def spellings(self, variant: CheckpointVariant) -> Spellings:
        """How names in a checkpoint of this variant differ from the names in today's official class."""
        lists = self.alternatives(self.head(variant))
        chosen = (each.spelling for several in lists for each in several if each.name in variant.traits)
        return Spellings([*chosen, *self.own_spellings, *self.spellings_of_ties(variant)])

    def reads_ignored(self, name: str) -> bool:
        """Whether `check_ignored` looks at the values of this tensor; others are not read."""
        return False

    def check_ignored(self, name: str, tensor: Tensor) -> str | None:
        """Why an ignored tensor is not what it must be for being ignored, or None. `name` is today's."""
        return None

    # The models.

    def prepare_official_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """An official model with what it can compute by itself as exact as its dtype allows, however it was stored."""
        return model

    def position_shift(self, config: PretrainedConfig) -> int:
        """What must be added to the position ids of a model of ours to get those of the official one."""
        return 0

    def official_arguments(self, variant: CheckpointVariant) -> dict[str, Any]:
        """What the official class takes in addition to its config."""
        return {}

    def not_runnable(self, config: PretrainedConfig) -> str | None:
        """Why transformers cannot run the official model of a config of ours any more, or None."""
        return None

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """Our model class of the first head."""
        return self.heads[0].model_class

    def official_class(self, variant: CheckpointVariant) -> type[PreTrainedModel]:
        """The official model class of a variant."""
        return getattr(transformers, variant.head)

    def our_class(self, variant: CheckpointVariant) -> type[PreTrainedModel]:
        """Our model class for a variant."""
        return self.head(variant).model_class
