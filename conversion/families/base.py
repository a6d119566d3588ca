"""A family: how one official kind of checkpoint and our settings say the same thing.

The official side is read through the configuration class of transformers, so that its defaults, its old spellings
(`rope_theta`, `rope_scaling`, `torch_dtype`) and its checks are the official ones, not a copy of them. No code of a
checkpoint takes part: the class is named by the family.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.config_checks import check_sizes

from ..errors import ConversionError, listed, shown
from ..files.checkpoint import NEVER_FOLLOWED
from ..rules.table import RuleTable

Shape = tuple[int, ...]

# Official settings that change what a model computes and that no family here has: name -> values that mean "not used".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "pretraining_tp": (None, 1),
    "partial_rotary_factor": (None, 1, 1.0),
    "is_encoder_decoder": (None, False),
    "cross_attention_hidden_size": (None,),
    "per_layer_config": (None, {}),
    "token_classification_bias": (None, True),
}
ABOUT_THE_FILE = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a config file that say where it comes from, not what the model is."""


@dataclass(frozen=True)
class Head:
    """What a model is for.

    Attributes:
        official: name of the official class in transformers.
        ours: name of ours in `blockformer`.
    """

    official: str
    ours: str


@dataclass(frozen=True)
class Form:
    """How one checkpoint of a family is written: what `config.json` alone does not say.

    Attributes:
        head: name of the official class that its tensors make.
        traits: which of several spellings its names have, and which optional tensors are there; the family's own words.
    """

    head: str
    traits: frozenset[str] = frozenset()


HeadKind = TypeVar("HeadKind", bound=Head)


class Family(ABC, Generic[HeadKind]):
    """One official kind of model, with its heads.

    Args:
        name: the official `model_type`; another name for a model that shares it.
        config_class: name of the official configuration class in transformers.
        heads: what its models are for; the first is taken where a config does not say.
    """

    spoken: tuple[str, ...] = ()
    """Entries of an official `config.json` that the family reads although the official class has dropped them."""
    has_low_bits = False
    """Whether its linear maps may have 4 bits."""
    refused: Mapping[str, str] = {}
    """Official classes of this `model_type` that no class of ours can be, with the reason."""
    counts_padding = False
    """Whether the official class counts padding among the positions, and takes no position ids."""
    is_file = False
    """Whether a checkpoint is one weight file with a file of settings, and is only read, never written."""

    def __init__(self, name: str, config_class: str, heads: Collection[HeadKind]):
        self.name = name
        self.config_class_name = config_class
        self.heads = tuple(heads)

    @abstractmethod
    def config_from(self, official: Mapping[str, Any], form: Form | None = None) -> dict[str, Any]:
        """Our settings for an official `config.json`, `architectures` among them.

        Args:
            official: the entries.
            form: what is known of the checkpoint; None takes what `official` alone says.

        Raises:
            ConversionError: naming every official setting that ours cannot express.
        """

    @abstractmethod
    def config_to(self, config: PretrainedConfig) -> dict[str, Any]:
        """The official `config.json` for a config of ours.

        Raises:
            ConversionError: naming every field of ours that the family cannot express.
        """

    @abstractmethod
    def rules_for(self, form: Form) -> RuleTable:
        """Which official tensors are which of ours. The official names are `canonical` ones.

        What the table ignores is kept beside the weights, for the way back.
        """

    def dequantizing_rules(self, form: Form, dtype: torch.dtype) -> RuleTable:
        """The rules that make plain weights of this dtype of a checkpoint whose linear maps have 4 bits.

        Raises:
            ConversionError: the family has no such checkpoints.
        """
        raise ConversionError(f"checkpoints of '{self.name}' have no 4-bit weights; use --dtype to cast plain ones")

    def form(
        self,
        official: Mapping[str, Any],
        names: Collection[str] | None = None,
        read: Callable[[str], Tensor] | None = None,
    ) -> Form:
        """The form of a checkpoint.

        Args:
            official: its `config.json`.
            names: its tensors; None takes the form that the official classes write.
            read: name -> tensor, for a family whose form depends on values too.

        Raises:
            ConversionError: `architectures` names a head that the family does not have.
        """
        architectures = official.get("architectures") or [self.heads[0].official]
        if architectures[0] in self.refused:
            raise ConversionError(
                f"config.json: architectures is {shown(architectures)}, which cannot be converted: "
                f"{self.refused[architectures[0]]}"
            )
        if len(architectures) != 1 or architectures[0] not in {head.official for head in self.heads}:
            raise ConversionError(
                f"config.json: architectures is {shown(architectures)}, which cannot be converted; "
                f"of '{self.name}' there are {', '.join(head.official for head in self.heads)}"
            )
        return Form(architectures[0])

    def form_for(self, config: PretrainedConfig, earlier: Form | None = None) -> Form:
        """The form in which a config of ours is written.

        Args:
            config: ours.
            earlier: the form that the checkpoint came in; it is taken again where it still fits.

        Raises:
            ConversionError: `architectures` names a head that the family does not have.
        """
        wanted = (config.architectures or [self.heads[0].ours])[0]
        for head in self.heads:
            if head.ours == wanted:
                return Form(head.official)
        raise ConversionError(
            f"config.json: architectures is {shown(config.architectures)}; of '{self.name}' only "
            f"{', '.join(head.ours for head in self.heads)} have an official layout"
        )

    def has_topology_of(self, config: PretrainedConfig) -> bool:
        """Whether one of the heads is for configs of this `model_type`."""
        import blockformer

        return any(getattr(blockformer, head.ours).config_class.model_type == config.model_type for head in self.heads)

    def head(self, form: Form) -> HeadKind:
        """The head that a form names."""
        return next(head for head in self.heads if head.official == form.head)

    def canonical(self, name: str, form: Form) -> str:
        """The name that the official class of today gives a tensor of a checkpoint."""
        return name

    def stored(self, name: str, form: Form) -> str:
        """The name in a checkpoint of this form of what the official class of today calls `name`."""
        return name

    def adjust(self, shapes: dict[str, Shape], form: Form, config: PretrainedConfig) -> dict[str, Shape]:
        """Adapt the tensors that the official class has to those that a checkpoint of this form has.

        Args:
            shapes: canonical name -> shape.
            form: the form.
            config: ours.
        """
        return shapes

    def optional(self, form: Form) -> tuple[str, ...]:
        """Canonical names of official tensors that may be left out beyond the tied ones."""
        return ()

    def ties(self, tied: Mapping[str, str], form: Form) -> dict[str, str]:
        """Which of the ties of the official class, name -> source, hold in a checkpoint of this form."""
        return dict(tied)

    def check_ignored(self, name: str, tensor: Tensor) -> str | None:
        """Why an ignored tensor is not what it must be for being ignored, or None. `name` is canonical."""
        return None

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        """An official model with what it can compute by itself as exact as its dtype allows, however it was stored."""
        return model

    def shift(self, config: PretrainedConfig) -> int:
        """What must be added to the position ids of a model of ours to get those of the official one."""
        return 0

    def official_arguments(self, form: Form) -> dict[str, Any]:
        """What the official class takes beside its config."""
        return {}

    def not_runnable(self, config: PretrainedConfig) -> str | None:
        """Why transformers cannot run the official model of a config of ours any more, or None."""
        return None

    def check_expressible(self, config: PretrainedConfig) -> None:
        """Refuse a config of ours that this family cannot express.

        Raises:
            ConversionError: naming every field.
        """
        lines = self.differences(config)
        if config.linear_bits is not None and not self.has_low_bits:
            lines.append("linear_bits must be None")
        if lines:
            raise ConversionError(f"the family '{self.name}' cannot express this config:{listed(lines)}")

    @property
    def rules(self) -> RuleTable:
        """The rules of the first head."""
        return self.rules_for(Form(self.heads[0].official))

    @property
    def model_type(self) -> str:
        """The official `model_type`."""
        return self.name

    @property
    def model_class_name(self) -> str:
        """The official class of the first head."""
        return self.heads[0].official

    @property
    def our_model_class_name(self) -> str:
        """Our class of the first head."""
        return self.heads[0].ours

    @abstractmethod
    def differences(self, config: PretrainedConfig) -> list[str]:
        """The fields of a config of ours that this family cannot express, with what it would need; empty: none."""

    @property
    def official_config_class(self) -> type[PretrainedConfig]:
        """The official configuration class."""
        return getattr(transformers, self.config_class_name)

    @property
    def official_model_class(self) -> type[PreTrainedModel]:
        """The official model class of the first head."""
        return self.official_class(Form(self.heads[0].official))

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """Our model class of the first head."""
        return self.our_class(Form(self.heads[0].official))

    @property
    def config_class(self) -> type[PretrainedConfig]:
        """Our configuration class of the first head."""
        return self.model_class.config_class

    def official_class(self, form: Form) -> type[PreTrainedModel]:
        """The official model class of a form."""
        return getattr(transformers, form.head)

    def our_class(self, form: Form) -> type[PreTrainedModel]:
        """Our model class for a form."""
        import blockformer

        return getattr(blockformer, self.head(form).ours)

    def official_config(self, official: Mapping[str, Any]) -> PretrainedConfig:
        """The official configuration object of a `config.json`.

        Raises:
            ConversionError: transformers refuses it.
        """
        settings = {name: value for name, value in official.items() if name not in ABOUT_THE_FILE + NEVER_FOLLOWED}
        layers = settings.get("num_hidden_layers")
        try:
            check_sizes(0, layers if type(layers) is int else 0, settings.get("num_labels"))  # before lists of them
            return self.official_config_class(**copy.deepcopy(settings))
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConversionError(f"config.json: {self.config_class_name} refuses it: {reason}") from error

    def our_config(self, settings: Mapping[str, Any]) -> PretrainedConfig:
        """Our configuration object of the settings that `config_from` gives.

        Raises:
            ConversionError: our config refuses them.
        """
        import blockformer

        wanted = {"architectures": [self.our_model_class_name], **copy.deepcopy(dict(settings))}
        try:
            return getattr(blockformer, wanted["architectures"][0]).config_class(**wanted)
        except ConversionError:
            raise
        except ValueError as error:
            raise ConversionError(f"config.json: {error}") from error

    def refuse_unsupported(self, official: Mapping[str, Any]) -> None:
        """Refuse settings that no family here can express.

        Raises:
            ConversionError: naming each of them.
        """
        lines = [
            f"{name} is {shown(value)}"
            for name, value in official.items()
            if name in UNSUPPORTED and not any(value == unused for unused in UNSUPPORTED[name])
        ]
        if lines:
            raise ConversionError(f"config.json: settings that cannot be converted:{listed(lines)}")

    def unused(self, official: Mapping[str, Any]) -> list[str]:
        """Entries of an official `config.json` that the official class does not know, so that they change nothing."""
        known = set(self.official_config({}).to_dict()) | {*ABOUT_THE_FILE, *NEVER_FOLLOWED, *UNSUPPORTED, *self.spoken}
        known |= {"architectures", "torch_dtype", "dtype", "rope_theta", "rope_scaling", "rope_parameters", "head_dim"}
        known |= set(transformers.GenerationConfig().to_dict())
        return sorted(name for name in official if name not in known)


# Of every configuration class: nothing that a model computes with, but part of what a user set.
COMMON_FIELDS = ("problem_type", "output_hidden_states", "return_dict", "chunk_size_feed_forward")


def common_entries(config: PretrainedConfig) -> dict[str, Any]:
    """What a config says in the same words in both layouts: `COMMON_FIELDS`, names of labels, the dtype."""
    entries = config.to_dict()
    names = (*COMMON_FIELDS, *(("dtype",) if entries.get("dtype") is not None else ()))
    return {**{name: entries[name] for name in names if name in entries}, **label_settings(entries)}


def unequal(config: PretrainedConfig, wanted: Mapping[str, Any]) -> list[str]:
    """A line for each field of a config that has not the wanted value."""
    return [
        f"{name} must be {value!r}, not {getattr(config, name)!r}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]


def token_or_none(token: Any) -> Any:
    """A token id, None for the -1 of old files, which means that there is none."""
    return None if isinstance(token, int) and token < 0 else token


def label_settings(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The labels' names in the entries of a config, if they are not those that it would have anyway."""
    names = entries.get("id2label")
    if names is None or {int(number): name for number, name in names.items()} == {0: "LABEL_0", 1: "LABEL_1"}:
        return {}
    return {"id2label": names, "label2id": entries["label2id"]}
