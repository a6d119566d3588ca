"""What a model is for: the official class and ours, and the tensors that only this head has."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.model_classes import MODELS

from ..rules.table import Rule, module_rules

RELEASED = frozenset(dir(transformers))
"""The classes of the installed release of transformers; listing them takes a third of a second."""
LANGUAGE_MODELS = ("ForCausalLM", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration")

VALUE_HEAD = ("v_head.summary.weight", "v_head.summary.bias")
"""What TRL trains next to a language model; no class of transformers reads it."""
VALUE_HEAD_NOTE = (
    "v_head.summary, a value head of TRL, is not part of the language model, and no class of transformers reads it; it "
    "is kept for the way back. To be rid of it, save pretrained_model of TRL's model"
)


@dataclass(frozen=True)
class Head:
    """What a model is for.

    Attributes:
        official: name of the official class in transformers.
        ours: name of ours in `blockformer`.
        root: prefix of the official names of the stack's tensors; our names have "model." if there is a head.
        modules: official module -> ours, each with weight and bias, beyond the stack's.
        tensors: official tensor -> ours, beyond those.
    """

    official: str
    ours: str
    root: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    @property
    def bare(self) -> bool:
        """Whether the model has no head: then tensor names have no prefix, in both layouts."""
        return self.ours.endswith("Model")

    @property
    def our_root(self) -> str:
        """Prefix of our names of the stack's tensors."""
        return "" if self.bare else "model."

    @property
    def writes_text(self) -> bool:
        """Whether it is a language model."""
        return self.ours.endswith(LANGUAGE_MODELS)

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """Our class."""
        return MODELS[self.ours]

    @property
    def official_class(self) -> type[PreTrainedModel]:
        """The official class; the common base class where transformers has none, as for an article's model."""
        return getattr(transformers, self.official, PreTrainedModel)

    @property
    def config_class(self) -> type[PretrainedConfig]:
        """The configuration class of ours."""
        return self.model_class.config_class

    @property
    def rules(self) -> list[Rule]:
        """The rules for its tensors."""
        return [*module_rules(self.modules), *(Rule(theirs, ours) for theirs, ours in self.tensors.items())]

    def has_tensors_in(self, names: Collection[str]) -> bool:
        """Whether all of its tensors are among these."""
        return all(rule.source in names for rule in self.rules)
